"""Watch a served repository and repair what died, without ever taking a busy server for a dead one.

Triton 2.51 stays "ready" after the process of a Python model (its stub) died, and never starts it again. A model counts
as dead when its stub is gone, when Triton says "Stub process … is not healthy", or when a probe gets no answer while no
other request of that model got a token in that time. Then that model alone is loaded again; never the ensemble, which
would load all its steps again. The engine host is started again when it has ended.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lpxbuild.errors import LpxError, ToolError
from lpxbuild.server import logs, processes
from lpxbuild.server.probes import Probe, Traffic, probe_request
from lpxbuild.server.triton_http import TritonHttpError

if TYPE_CHECKING:
    from lpxbuild.server.running import RunningServer

NOT_HEALTHY = re.compile(r"Stub process '(?P<instance>\S+)' is not healthy")
STUB = "triton_python_backend_stub"
ENGINE_HOST = "engine host"
ENGINE_MODEL = "tensorrt_llm"
BLS_MODEL = "tensorrt_llm_bls"
# An unanswered probe of tensorrt_llm needs no more time than this where the engine has nothing to do.
IDLE_ENGINE_SECONDS = 10.0


@dataclass(frozen=True)
class SupervisorSettings:
    """Periods and limits, in seconds.

    Attributes:
        poll: between two looks at processes and log.
        probe_every: a model without traffic for so long is probed.
        probe_timeout: a probe without answer for so long is a sign of death; long enough for the prefill of a long
            prompt, in which nobody gets a token.
        repair_timeout: for loading a model, and for starting the engine host.
        most_repairs: so many of one model within `repair_window` and the server is given up.
    """

    poll: float = 0.5
    probe_every: float = 15.0
    probe_timeout: float = 90.0
    repair_timeout: float = 300.0
    most_repairs: int = 5
    repair_window: float = 120.0


def stubs_of(server_pid: int) -> dict[str, int]:
    """Model instance ("tensorrt_llm_0_0") → pid of its live stub, among the children of tritonserver."""
    found = {}
    for process in processes.all_states():
        if process.parent == server_pid and process.state not in "ZX":
            arguments = processes.command_line(process.pid)
            if arguments and arguments[0].endswith(STUB):
                instance = next((text for text in reversed(arguments) if re.search(r"_\d+_\d+$", text)), "")
                found[instance] = process.pid
    return found


def model_of(instance: str) -> str:
    """ "tensorrt_llm_0_0" → "tensorrt_llm" (Triton appends the instance group and the number in it)."""
    return re.sub(r"_\d+_\d+$", "", instance)


class Supervisor:
    """The watching thread of one server.

    Attributes:
        repairs: what was repaired, in order.
        error: why the server was given up; None while it serves.
    """

    def __init__(self, server: RunningServer, settings: SupervisorSettings) -> None:
        self.repairs: list[str] = []
        self.error: LpxError | None = None
        self._server = server
        self._settings = settings
        self._stop = threading.Event()
        self._stubs = stubs_of(server.pid)
        self._log_position = logs.size(server.log_path)
        self._probes: dict[str, Probe] = {}
        self._traffic = Traffic()
        self._traffic_at: dict[str, float] = {}
        self._repaired_at: list[tuple[float, str]] = []
        self._thread = threading.Thread(target=self._run, name="lpx-supervisor", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; a repair that is under way is left to itself (the server goes away anyway)."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2)

    def _run(self) -> None:
        while not self._stop.wait(self._settings.poll):
            try:
                self._look()
            except LpxError as error:
                if not self._stop.is_set():
                    self.error = error
                return
            except Exception as error:
                # A watcher that dies without a word would leave a server that only seems to be watched.
                if not self._stop.is_set():
                    self.error = LpxError(
                        f"a bug in lpx: the supervisor failed: {type(error).__name__}: {error}",
                        why="the server cannot be watched any longer",
                        next="start it again, and report this",
                    )
                return

    def _look(self) -> None:
        self._server.raise_if_ended("while it was serving")
        host = self._server.engine_host
        if host is not None and not host.alive():
            self._restart_engine_host()
        for model in self._models_with_lost_stub() | self._models_named_in_log() | self._models_silent():
            if self._stop.is_set():
                return
            self._repair(model)

    def _models_with_lost_stub(self) -> set[str]:
        lost = {instance for instance, pid in self._stubs.items() if not processes.alive(pid)}
        current = stubs_of(self._server.pid) if lost else {}
        dead = set()
        if lost:
            states = self._model_states()
            for instance in lost:
                # Somebody may have loaded or unloaded the model through Triton's own interface: that is no death.
                if instance not in current and states.get(model_of(instance)) == "READY":
                    dead.add(model_of(instance))
            self._stubs = current if not dead else self._stubs
        return dead

    def _model_states(self) -> dict[str, str]:
        try:
            return self._server.client.model_states(timeout=10)
        except TritonHttpError:
            return {}

    def _models_named_in_log(self) -> set[str]:
        text, self._log_position = logs.whole_lines_from(self._server.log_path, self._log_position)
        named = {model_of(match["instance"]) for match in NOT_HEALTHY.finditer(text)}
        # A late line about a stub that was replaced since is no new death: ask before acting.
        for model in named:
            self._begin_probe(model)
        return set()

    def _models_silent(self) -> set[str]:
        now = time.monotonic()
        try:
            moved = self._traffic.update(self._server.client.answers_given(timeout=5))
        except TritonHttpError:
            moved = set()
        dead = set()
        for model in self._server.models:
            if model in moved:
                self._traffic_at[model] = now
            seen = self._traffic_at.setdefault(model, now)
            probe = self._probes.get(model)
            if probe is None:
                if now - seen > self._settings.probe_every:
                    self._begin_probe(model)
            elif probe.done:
                del self._probes[model]
                self._traffic_at[model] = now
                if probe.error is not None and NOT_HEALTHY.search(str(probe.error)):
                    dead.add(model)
            elif now - probe.started > self._settings.probe_timeout:
                if seen > probe.started or self._engine_explains(model, probe.started):
                    # Busy, not dead: the probe waits its turn like everybody else.
                    probe.started = now
                else:
                    del self._probes[model]
                    dead.add(model)
            elif model == ENGINE_MODEL and now - probe.started > IDLE_ENGINE_SECONDS and self._engine_idle():
                # No long prompt and no queue explains the silence.
                del self._probes[model]
                dead.add(model)
        return dead

    def _engine_idle(self) -> bool:
        host = self._server.engine_host
        stats = host.stats(timeout=2) if host is not None else None
        return stats is not None and int(stats["active"]) == 0

    def _engine_explains(self, model: str, moment: float) -> bool:
        """Whether the engine made a token since `moment`, or is itself what does not answer (and is ended then)."""
        host = self._server.engine_host
        if model != ENGINE_MODEL or host is None:
            return False
        stats = host.stats(timeout=min(10.0, self._settings.probe_timeout))
        if stats is None:
            self._server.output.notice("the engine host does not answer any more")
            host.kill()
            return True
        # Requests that do not come through the ensemble are in no counter of Triton until they end.
        age = stats.get("last_token_age_seconds")
        return age is not None and time.monotonic() - age > moment

    def _begin_probe(self, model: str) -> None:
        # No time-out of the connection below the one judged here: the probe of a busy server may take long.
        send = probe_request(self._server.client, model, timeout=24 * 3600)
        if send is not None and model not in self._probes and model in self._server.models:
            self._traffic.count_probe(model)
            self._probes[model] = Probe(send)

    def _repair(self, model: str) -> None:
        self._count_repair(model)
        self._server.output.notice(f"model {model} is dead; loading it again")
        started = time.monotonic()
        try:
            self._server.client.load(model, self._settings.repair_timeout)
        except TritonHttpError as error:
            self._server.raise_if_ended(f"while model {model} was being repaired")
            raise self._server.failure(f"model {model} died and could not be loaded again: {error}") from error
        self._after_repair(model, started)

    def _restart_engine_host(self) -> None:
        host = self._server.engine_host
        assert host is not None
        self._count_repair(ENGINE_HOST)
        self._server.output.notice("the engine host has ended; starting it again")
        started = time.monotonic()
        if not host.adopt_successor():
            host.start(self._settings.repair_timeout)
        self._after_repair(ENGINE_HOST, started)

    def _count_repair(self, name: str) -> None:
        now = time.monotonic()
        self._repaired_at = [(at, who) for at, who in self._repaired_at if now - at < self._settings.repair_window]
        times = sum(who == name for _, who in self._repaired_at)
        if times >= self._settings.most_repairs:
            raise ToolError(
                f"{name} died {times + 1} times within {self._settings.repair_window:.0f} s",
                why=f"its log is {self._server.log_path}",
                next=f"cat {self._server.log_path}",
            )
        self._repaired_at.append((now, name))

    def _after_repair(self, name: str, started: float) -> None:
        self.repairs.append(name)
        self._stubs = stubs_of(self._server.pid)
        self._probes.pop(name, None)
        self._traffic_at[name] = time.monotonic()
        if name == BLS_MODEL:
            # Triton lets tensorrt_llm hang on an answer that the dead process was to take: look at once.
            self._begin_probe(ENGINE_MODEL)
        # What was logged about the old process says nothing about the new one.
        self._log_position = logs.size(self._server.log_path)
        self._server.output.notice(f"{name} is back after {time.monotonic() - started:.1f} s")
