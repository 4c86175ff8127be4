"""`lpx serve`: in the foreground until a signal comes, detached, and stopped again.

One folder per served build (`state`) holds `server.json` (who serves it, where, and its logs) and a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from lpxbuild import errors
from lpxbuild.errors import HostError, LpxError, ToolError
from lpxbuild.output import Output
from lpxbuild.server import guard, logs, processes
from lpxbuild.server.launch import ServerSettings, start
from lpxbuild.server.running import RunningServer
from lpxbuild.server.supervisor import SupervisorSettings

STATUS_NAME = "server.json"
LOG_NAME = "triton.log"
DAEMON_LOG_NAME = "lpx.log"


class _Stopped(BaseException):
    """A signal came while the server was starting or draining."""


def read_status(state: Path) -> dict[str, Any] | None:
    """`server.json` of a live server: pid, state ("starting", "ready"), ports, urls, log; None where nothing runs."""
    try:
        status: dict[str, Any] = json.loads((state / STATUS_NAME).read_text(encoding="utf-8"))
        running = processes.alive(int(status["pid"]), int(status["pid_start"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return status if running else None


def serve(
    repository: Path,
    *,
    state: Path,
    settings: ServerSettings | None = None,
    log_path: Path | None = None,
    cache: Path | None = None,
    output: Output | None = None,
    on_ready: Callable[[RunningServer], None] | None = None,
) -> int:
    """Serve a repository in this process until SIGINT or SIGTERM; to be called from the main thread.

    The first signal drains, a second one ends everything at once.

    Args:
        state: folder for `server.json` and, without `log_path`, for the logs.
        on_ready: called once the server has answered its first generation.

    Returns:
        The exit status: 130 after SIGINT, 143 after SIGTERM.

    Raises:
        HostError: already served, or as `start`.
        ToolError: the server ended by itself, or could not be repaired.
    """
    settings = settings or ServerSettings()
    output = output or Output()
    log_path = log_path or state / LOG_NAME
    with _only_one(state), _signals() as received:
        server = None
        try:
            received.interrupt_from_here()
            _write_status(state, {"state": "starting", "log": str(log_path.absolute())})
            server = start(repository, log_path=log_path, settings=settings, cache=cache, output=output)
            # From here on a signal is waited for; it interrupts nothing.
            received.interrupts = False
        except (_Stopped, Exception):
            # With a signal any Exception: an extension module that is being imported makes an ImportError of a stop.
            if not received.number:
                raise
            if server is not None:
                server.kill()
            output.notice("stopped while starting")
            return 128 + received.number
        try:
            _write_status(state, _description(server))
            if on_ready is not None:
                on_ready(server)
            while not received.event.wait(0.2):
                if (error := server.error) is not None:
                    raise error
            output.step(f"server: stopping (running requests get {settings.drain_seconds} s)")
            received.interrupts = True
            server.stop()
            received.interrupts = False
        except _Stopped:
            output.notice("second signal: stopped without waiting for running requests")
        finally:
            server.kill()
        return 128 + received.number


def detach(
    repository: Path,
    *,
    state: Path,
    settings: ServerSettings | None = None,
    log_path: Path | None = None,
    cache: Path | None = None,
    output: Output | None = None,
) -> dict[str, Any]:
    """Serve in a process of its own that outlives this one; returns its status once it is ready.

    Raises:
        LpxError: whatever ended the start over there.
    """
    output = output or Output.quiet()
    daemon_log = state / DAEMON_LOG_NAME
    with _writable(state):
        state.mkdir(parents=True, exist_ok=True)
        daemon_log.open("ab").close()
    call = {
        "repository": str(repository.absolute()),
        "state": str(state.absolute()),
        "settings": asdict(settings or ServerSettings()),
        "log_path": str(log_path.absolute()) if log_path else None,
        "cache": str(cache.absolute()) if cache else None,
    }
    reader, writer = os.pipe()
    try:
        with daemon_log.open("ab") as log:
            package_root = str(Path(__file__).resolve().parents[2])
            forked = subprocess.run(
                [sys.executable, "-m", "lpxbuild.server.daemon", str(writer), json.dumps(call)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[writer],
                env={**os.environ, "PYTHONPATH": package_root},
                check=False,
            )
    finally:
        os.close(writer)
    output.step(f"server: starting in the background (log: {daemon_log})")
    try:
        with os.fdopen(reader, encoding="utf-8") as pipe:
            message = pipe.read()
    except BaseException:
        # Ctrl-C while waiting: the half-started server must not stay.
        with contextlib.suppress(ValueError, ProcessLookupError):
            os.kill(int(forked.stdout), signal.SIGTERM)
        raise
    if not message:
        lines = logs.last_useful_lines(daemon_log)
        raise ToolError(
            "the background process ended before the server was ready",
            why="\n".join([f"its log is {daemon_log}", *lines]),
            next=f"cat {daemon_log}",
        )
    answer: dict[str, Any] = json.loads(message)
    if "error" in answer:
        kind = getattr(errors, answer["error"], ToolError)
        raise kind(answer["what"], why=answer["why"], next=answer["next"])
    return answer


def stop(state: Path, *, output: Output | None = None) -> bool:
    """Stop the server of a build, wherever it was started; returns whether there was one.

    Raises:
        ToolError: it did not end, even when killed.
    """
    output = output or Output.quiet()
    status = read_status(state)
    if status is None:
        return False
    pid, begun = int(status["pid"]), int(status["pid_start"])
    bound = float(status.get("drain_seconds", 30)) + guard.DRAIN_MARGIN
    output.step(f"server: stopping pid {pid}")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    # 10 s more than the server's own bound, for its clean-up.
    if not _wait_for_end(pid, begun, bound + 10):
        output.notice(f"pid {pid} did not end within {bound + 10:.0f} s and was killed")
        processes.kill([pid])
    # Where it had to be killed, its guard needs its time to end the rest.
    triton = int(status.get("triton_pid", 0))
    if triton and not _wait_for_end(triton, int(status.get("triton_start", 0)), bound + 10):
        raise ToolError(f"tritonserver (pid {triton}) does not end", next=f"kill -9 -{triton}")
    (state / STATUS_NAME).unlink(missing_ok=True)
    return True


def _wait_for_end(pid: int, begun: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while processes.alive(pid, begun):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class _Received:
    """What the signal handlers saw."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.number = 0
        self.interrupts = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self.number = self.number or number
        self.event.set()
        if self.interrupts:
            self.interrupts = False
            raise _Stopped

    def interrupt_from_here(self) -> None:
        """Let a signal raise _Stopped in the main thread, once; one that came already does so now."""
        self.interrupts = True
        if self.number:
            self.interrupts = False
            raise _Stopped


@contextlib.contextmanager
def _signals() -> Iterator[_Received]:
    received = _Received()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, received.handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _writable(state: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostError(
            f"{state} cannot be written: {error.strerror}",
            why="a server's status, lock and logs are kept there",
            next="make it writable; for a bare repository: lpx serve REPOSITORY --cache-dir FOLDER",
        ) from error


def _who_serves(status: dict[str, Any] | None) -> str:
    if status is None:
        # Its lock is held, but its status is not written yet, or gone already.
        return "this build is served already by another process"
    if "http_url" not in status:
        return f"this build is being started already by pid {status['pid']}"
    return f"this build is served already by pid {status['pid']} at {status['http_url']}"


@contextlib.contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Hold the lock of a build's server; the status file goes when the lock does."""
    with _writable(state):
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "server.lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise HostError(_who_serves(read_status(state)), next="lpx serve BUILD --stop") from error
        try:
            yield
        finally:
            (state / STATUS_NAME).unlink(missing_ok=True)


def _description(server: RunningServer) -> dict[str, Any]:
    return {
        "state": "ready",
        "http_url": server.http_url,
        "grpc_url": server.grpc_url,
        "metrics_url": server.metrics_url,
        "ports": server.ports,
        "triton_pid": server.pid,
        "triton_start": found.start if (found := processes.state(server.pid)) else 0,
        "engine_pid": server.engine_host.pid if server.engine_host else None,
        "engine_directory": str(server.runtime.folder),
        "shm_prefix": server.runtime.shm_prefix,
        "repository": str(server.repository),
        "drain_seconds": server.drain_seconds,
        "log": str(server.log_path.absolute()),
    }


def _write_status(state: Path, fields: dict[str, Any]) -> None:
    own = processes.state(os.getpid())
    content = {"pid": os.getpid(), "pid_start": own.start if own else 0, **fields}
    fresh = state / f".{STATUS_NAME}.{os.getpid()}"
    fresh.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    fresh.replace(state / STATUS_NAME)


def serve_detached(ready_descriptor: int, call: dict[str, Any]) -> int:
    """The life of the background process: serve, and tell the starter once whether that works."""
    settings = ServerSettings(
        **{**call["settings"], "supervisor": SupervisorSettings(**call["settings"]["supervisor"])}
    )
    state = Path(call["state"])
    pipe = os.fdopen(ready_descriptor, "w", encoding="utf-8")

    def tell(message: dict[str, Any]) -> None:
        # Told once: later errors only go to the log.
        if not pipe.closed:
            with contextlib.suppress(BrokenPipeError), pipe:
                json.dump(message, pipe)

    output = Output("human", stdout=sys.stderr)
    try:
        return serve(
            Path(call["repository"]),
            state=state,
            settings=settings,
            log_path=Path(call["log_path"]) if call["log_path"] else None,
            cache=Path(call["cache"]) if call["cache"] else None,
            output=output,
            on_ready=lambda _server: tell(read_status(state) or {}),
        )
    except LpxError as error:
        output.error(error)
        tell(dict(error.as_dict()))
        return error.exit_code
