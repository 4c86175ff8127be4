"""A small process that outlives lpx for one purpose: nothing of a server stays when lpx is killed.

`python -m lpxbuild.server.guard MARK SHM_PREFIX RUNTIME_FOLDER DRAIN_SECONDS LOG [ENSEMBLE…]` reads its standard input,
the end of a pipe that lpx holds. "done" means that lpx has cleaned up itself; the end of the pipe without it means that
lpx died.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from lpxbuild.server import drain, logs, processes
from lpxbuild.server.engine_host import EngineLink

# In the environment of everything that a server consists of: what lpx started, and what those started in turn.
MARK_VARIABLE = "LPX_SERVER_ID"
# Beyond drain_seconds, for unloading; after that the process groups are killed.
DRAIN_MARGIN = 5.0


class Guard:
    """The guard of one server, seen from lpx."""

    def __init__(
        self,
        mark: str,
        shm_prefix: str,
        runtime: Path,
        drain_seconds: float,
        log_path: Path,
        ensembles: Iterable[str],
    ) -> None:
        package_root = str(Path(__file__).resolve().parents[2])
        arguments = [mark, shm_prefix, str(runtime), str(drain_seconds), str(log_path.absolute()), *ensembles]
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": package_root},
        )

    def dismiss(self) -> None:
        """Tell it that all is clean, and wait for its end."""
        with contextlib.suppress(OSError):
            self._process.communicate(b"done\n", timeout=10)
        self._process.kill()
        self._process.wait()


def sweep(mark: str, shm_prefix: str, runtime: Path) -> list[str]:
    """Kill whatever is left of a server, remove its shared memory and its runtime folder.

    Returns:
        Shared-memory segments that somebody else has mapped, and that were left for this reason.
    """
    # Twice: a process may have forked between the listing and the kill.
    for _ in range(2):
        processes.kill(processes.marked(MARK_VARIABLE, mark))
    left = processes.remove_shared_memory(shm_prefix)
    shutil.rmtree(runtime, ignore_errors=True)
    return left


def _drain(mark: str, seconds: float, runtime: Path, log_path: Path, ensembles: set[str]) -> None:
    """SIGTERM to the server, so that running requests finish; wait for its end, or until it waits for nobody."""
    position = logs.size(log_path)
    servers = [pid for pid in processes.marked(MARK_VARIABLE, mark) if _is_triton(pid)]
    for pid in servers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds + DRAIN_MARGIN
    while any(processes.alive(pid) for pid in servers) and time.monotonic() < deadline:
        if drain.forsaken(logs.read_from(log_path, position), ensembles) and _engine_idle(runtime):
            return
        time.sleep(0.1)


def _engine_idle(runtime: Path) -> bool:
    try:
        with EngineLink(runtime, timeout=5) as link:
            return int(link.stats()["active"]) == 0
    except OSError:
        # Gone, or a repository without an engine host.
        return True


def _is_triton(pid: int) -> bool:
    arguments = processes.command_line(pid)
    return bool(arguments) and Path(arguments[0]).name == "tritonserver"


def main(arguments: list[str]) -> int:
    """Entry point of the guard process."""
    mark, shm_prefix, runtime, drain_seconds, log_path, *ensembles = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.readline().strip() != "done":
        _drain(mark, float(drain_seconds), Path(runtime), Path(log_path), set(ensembles))
        sweep(mark, shm_prefix, Path(runtime))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
