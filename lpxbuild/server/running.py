"""A server that runs: its processes, its addresses, its end."""

from __future__ import annotations

import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from lpxbuild.errors import LpxError, ToolError
from lpxbuild.output import Output
from lpxbuild.server import checks, drain, guard, logs, processes
from lpxbuild.server.engine_host import EngineHost
from lpxbuild.server.supervisor import Supervisor, SupervisorSettings
from lpxbuild.server.triton_http import TritonHttp


@dataclass(frozen=True)
class Runtime:
    """What belongs to one server beside its processes.

    Attributes:
        mark: value of LPX_SERVER_ID in the environment of every process of this server.
        shm_prefix: start of the names of its segments in /dev/shm.
        folder: sockets; removed at the end.
        guard: cleans up when lpx itself is killed.
    """

    mark: str
    shm_prefix: str
    folder: Path
    guard: guard.Guard


class RunningServer:
    """A tritonserver with its engine host and its supervisor. A context manager: leaving it stops the server.

    Attributes:
        ports: of "http", "grpc" and "metrics".
        models: what was loaded, by name.
        log_path: output of tritonserver.
    """

    def __init__(
        self,
        *,
        repository: Path,
        models: dict[str, checks.ServedModel],
        ports: dict[str, int],
        address: str,
        log_path: Path,
        drain_seconds: float,
        runtime: Runtime,
        engine_host: EngineHost | None,
        supervisor_settings: SupervisorSettings,
        output: Output,
    ) -> None:
        self.repository = repository
        self.models = models
        self.ports = ports
        self.address = f"[{address}]" if ":" in address else address
        self.log_path = log_path
        self.drain_seconds = drain_seconds
        self.runtime = runtime
        self.engine_host = engine_host
        self.output = output
        self.process: subprocess.Popen[bytes] | None = None
        # A server that listens everywhere is asked through the loopback.
        reachable = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(self.address, self.address)
        self.client = TritonHttp(f"{reachable}:{ports['http']}")
        self._reachable = reachable
        self._log_start = logs.size(log_path)
        self._supervisor_settings = supervisor_settings
        self._supervisor: Supervisor | None = None
        self._stop_lock = threading.Lock()
        self._stopped = False

    @property
    def http_url(self) -> str:
        """Address of HTTP as tritonclient takes it: "127.0.0.1:8000"."""
        return f"{self._reachable}:{self.ports['http']}"

    @property
    def grpc_url(self) -> str:
        """Address of gRPC as tritonclient takes it."""
        return f"{self._reachable}:{self.ports['grpc']}"

    @property
    def metrics_url(self) -> str:
        """Where Prometheus reads."""
        return f"http://{self._reachable}:{self.ports['metrics']}/metrics"

    @property
    def pid(self) -> int:
        """Process id (and process group) of tritonserver; 0 before it was started."""
        return self.process.pid if self.process is not None else 0

    @property
    def repairs(self) -> list[str]:
        """What the supervisor has repaired so far: model names and "engine host"."""
        return list(self._supervisor.repairs) if self._supervisor is not None else []

    @property
    def error(self) -> LpxError | None:
        """Why this server cannot serve any longer; None while it does."""
        if self._supervisor is not None and self._supervisor.error is not None:
            return self._supervisor.error
        if self.process is not None and self.process.poll() is not None and not self._stopped:
            return self._ended("while it was serving")
        return None

    def supervise(self) -> None:
        """Begin to watch the server."""
        self._supervisor = Supervisor(self, self._supervisor_settings)
        self._supervisor.start()

    def stop(self) -> None:
        """Drain: running requests finish within `drain_seconds`; then the process group is killed.

        Returns with no process, no segment of shared memory and no socket left; more calls do nothing.
        """
        with self._stop_lock:
            if self._stopped:
                return
            if self._supervisor is not None:
                self._supervisor.stop()
            try:
                if self.process is not None and self.process.poll() is None:
                    self._drain(self.process)
            finally:
                self._clean_up()

    def kill(self) -> None:
        """End everything now."""
        with self._stop_lock:
            if self._stopped:
                return
            if self._supervisor is not None:
                self._supervisor.stop()
            self._clean_up()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def failure(self, what: str) -> ToolError:
        """A ToolError with the last useful lines of the log."""
        lines = logs.last_useful_lines(self.log_path, position=self._log_start)
        return ToolError(what, why="\n".join([f"its log is {self.log_path}", *lines]), next=f"cat {self.log_path}")

    def raise_if_ended(self, when: str) -> None:
        """Raise ToolError where tritonserver has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise self._ended(when)

    def _ended(self, when: str) -> ToolError:
        assert self.process is not None
        status = self.process.returncode
        how = f"status {status}"
        if status < 0:
            how = f"signal {signal.Signals(-status).name}"
        return self.failure(f"tritonserver ended with {how} {when}")

    def _drain(self, process: subprocess.Popen[bytes]) -> None:
        instances = sum(model.instances for model in self.models.values())
        unload, end = drain.REPAIRED_UNLOAD_SECONDS, drain.REPAIRED_EXIT_SECONDS
        if not self.repairs:
            unload = drain.UNLOAD_SECONDS + instances * drain.UNLOAD_SECONDS_PER_INSTANCE
            end = drain.EXIT_SECONDS
        finished = drain.drain(
            process,
            self.log_path,
            bound=self.drain_seconds + guard.DRAIN_MARGIN,
            unload=unload,
            exit=end,
            # Without an engine host nobody can tell an idle engine from a busy one.
            repaired=bool(self.repairs) and self.engine_host is not None,
            models={model.name for model in self.models.values() if not model.steps},
            ensembles={model.name for model in self.models.values() if model.steps},
            engine_idle=self._engine_idle,
        )
        if not finished:
            self.output.notice(
                f"requests were still running after {self.drain_seconds:.0f} s and were ended; log: {self.log_path}"
            )

    def _engine_idle(self) -> bool:
        if self.engine_host is None:
            return True
        stats = self.engine_host.stats(timeout=5)
        return stats is None or int(stats["active"]) == 0

    def _clean_up(self) -> None:
        self._stopped = True
        if self.process is not None:
            # The group outlives its leader: a busy stub stays as an orphan when the server's own time is over.
            processes.signal_group(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.engine_host is not None:
            self.engine_host.stop(patience=3)
        left = guard.sweep(self.runtime.mark, self.runtime.shm_prefix, self.runtime.folder)
        if left:
            self.output.notice(f"left in /dev/shm, because another process has it open: {', '.join(left)}")
        self.runtime.guard.dismiss()
