"""From a model repository to a running server: the command line, the processes, the wait until it really answers."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from lpxbuild.errors import HostError, SourceError, ToolError
from lpxbuild.output import Output
from lpxbuild.server import checks, embedded, guard, logs
from lpxbuild.server.engine_host import EngineHost
from lpxbuild.server.running import RunningServer, Runtime
from lpxbuild.server.supervisor import SupervisorSettings
from lpxbuild.server.triton_http import TritonHttp, TritonHttpError

LOCALHOST = "127.0.0.1"
ENSEMBLE = "ensemble"
ENGINE_MODEL = "tensorrt_llm"
BLS_MODEL = "tensorrt_llm_bls"
WARMUP_TEXT = "Hello, how are you?"
WARMUP_TOKENS = 4


@dataclass(frozen=True)
class ServerSettings:
    """How a repository is served.

    Attributes:
        http_port, grpc_port, metrics_port: 0 takes a free port.
        address: to listen on; nothing but this host can reach 127.0.0.1.
        drain_seconds: time that running requests get at shut-down.
        warmup_prompts: generations made before the server counts as ready (one more is always made and looked at).
        start_seconds: longest time for loading the engine, and again for loading the models.
    """

    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    address: str = LOCALHOST
    drain_seconds: int = 30
    warmup_prompts: int = 1
    start_seconds: float = 600.0
    supervisor: SupervisorSettings = field(default_factory=SupervisorSettings)


def command(
    server: embedded.EmbeddedServer,
    repository: Path,
    models: list[str],
    ports: dict[str, int],
    settings: ServerSettings,
    shm_prefix: str,
) -> list[str]:
    """The exact command line of tritonserver."""
    arguments = [
        str(server.binary),
        f"--model-repository={repository}",
        f"--backend-directory={server.backends}",
        # Explicit, because only then one model can be loaded again after its process died.
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        "--disable-auto-complete-config",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        f"--exit-timeout-secs={settings.drain_seconds}",
        "--reuse-grpc-port=false",
        # No GPU here: without these two every start logs warnings about one.
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
    ]
    for name in ("http", "grpc", "metrics"):
        arguments += [f"--{name}-address={settings.address}", f"--{name}-port={ports[name]}"]
    return arguments


def models_to_load(models: dict[str, checks.ServedModel], output: Output) -> list[str]:
    """All models of the repository, without the BLS where the embedded server would crash on it."""
    if ENSEMBLE not in models:
        raise SourceError(
            f"the repository has no model {ENSEMBLE!r} (found: {', '.join(models)})",
            next="lpx build RECIPE --to repository",
        )
    names = list(models)
    if BLS_MODEL in names and not embedded.bls_is_safe():
        names.remove(BLS_MODEL)
        output.notice(
            f"{BLS_MODEL} is not loaded: Triton 2.51 crashes on its calls with this Python; it needs Python 3.11"
        )
    return names


def wanted_ports(settings: ServerSettings) -> dict[str, int]:
    """Port numbers of the settings by service."""
    return {"http": settings.http_port, "grpc": settings.grpc_port, "metrics": settings.metrics_port}


def dry_run(
    repository: Path, settings: ServerSettings, output: Output, *, cache: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """All checks, and the command line and the environment variables that `start` would use now."""
    models = _check(repository, output)
    ports = checks.choose_ports(wanted_ports(settings), settings.address)
    server = embedded.find(cache)
    names = models_to_load(models, output)
    for path in (repository.absolute(), server.backends):
        if not _is_speakable(path):
            raise HostError(
                f"no command line can serve {path}",
                why="Triton splits the command line of its Python models at spaces and takes file names for ASCII; "
                "lpx serve goes around that with a link",
                next="lpx serve without --dry-run, or move the folder",
            )
    environment = server.environment({"PATH": os.environ.get("PATH", os.defpath)})
    return command(server, repository.absolute(), names, ports, settings, "lpx_dry_run_"), environment


def start(
    repository: Path,
    *,
    log_path: Path,
    settings: ServerSettings | None = None,
    cache: Path | None = None,
    output: Output | None = None,
) -> RunningServer:
    """Serve a repository; returns when a real generation through the ensemble has been answered.

    Args:
        repository: Triton model repository as `lpx build` renders it, also a copy elsewhere.
        log_path: file for the output of tritonserver; the engine host writes `engine_host.log` beside it.
        cache: folder for the backend directory, see `embedded.find`.

    Returns:
        The running server, a context manager that stops it.

    Raises:
        HostError: extra not installed, port busy, /dev/shm too small.
        SourceError: repository or engine not usable.
        ToolError: server or engine host failed; the message has the lines of the log that say why.
    """
    settings = settings or ServerSettings()
    output = output or Output.quiet()
    repository = repository.absolute()
    models = _check(repository, output)
    server = embedded.find(cache)
    names = models_to_load(models, output)
    _prepare_log(log_path)
    for attempt in (1, 2):
        ports = checks.choose_ports(wanted_ports(settings), settings.address)
        try:
            return _launch(repository, models, names, server, ports, settings, log_path, output)
        except ToolError as error:
            # A free port may be taken by somebody else between our look and the server's bind.
            if attempt == 2 or 0 not in wanted_ports(settings).values() or not _port_was_taken(str(error)):
                raise
    raise AssertionError("unreachable")


def _check(repository: Path, output: Output) -> dict[str, checks.ServedModel]:
    models = checks.models(repository)
    checks.check_repository(repository)
    checks.check_engine(repository)
    checks.check_shared_memory(models)
    checks.check_open_files()
    return models


def _prepare_log(log_path: Path) -> None:
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        log_path.open("ab").close()
    except OSError as error:
        raise HostError(f"the log {log_path} cannot be written: {error.strerror}", next="--log FILE") from error


def _port_was_taken(text: str) -> bool:
    return "address already in use" in text.lower() or "failed to start" in text.lower()


def _launch(
    repository: Path,
    models: dict[str, checks.ServedModel],
    names: list[str],
    server: embedded.EmbeddedServer,
    ports: dict[str, int],
    settings: ServerSettings,
    log_path: Path,
    output: Output,
) -> RunningServer:
    mark = secrets.token_hex(8)
    runtime_folder = _runtime_folder()
    shm_prefix = f"lpx_{mark}_"
    server = replace(server, backends=_speakable(server.backends, runtime_folder))
    spoken = _speakable(repository, runtime_folder)
    environment = server.environment()
    environment[guard.MARK_VARIABLE] = mark
    environment["LPX_ENGINE_DIR"] = str(runtime_folder)
    ensembles = [name for name in names if models[name].steps]
    watchman = guard.Guard(mark, shm_prefix, runtime_folder, settings.drain_seconds, log_path, ensembles)
    runtime = Runtime(mark, shm_prefix, runtime_folder, watchman)
    version_folder = repository / ENGINE_MODEL / "1"
    engine_host = None
    if (version_folder / "engine_host.py").exists():
        parameters = models[ENGINE_MODEL].config.parameters
        interpreter = parameters["engine_python"].string_value if "engine_python" in parameters else ""
        engine_log = log_path.with_name("engine_host.log")
        engine_host = EngineHost(version_folder, runtime_folder, engine_log, environment, interpreter)
    running = RunningServer(
        repository=repository,
        models={name: models[name] for name in names},
        ports=ports,
        address=settings.address,
        log_path=log_path,
        drain_seconds=settings.drain_seconds,
        runtime=runtime,
        engine_host=engine_host,
        supervisor_settings=settings.supervisor,
        output=output,
    )
    try:
        if engine_host is not None:
            output.step(f"engine: loading (log: {engine_host.log_path})")
            engine_host.start(settings.start_seconds)
        output.step(f"server: starting (log: {log_path})")
        with log_path.open("ab") as log:
            running.process = subprocess.Popen(
                command(server, spoken, names, ports, settings, shm_prefix),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        _wait_until_loaded(running, settings.start_seconds)
        _warm_up(running.client, settings.warmup_prompts, settings.start_seconds, running)
        running.supervise()
    except BaseException:
        running.kill()
        raise
    return running


def _runtime_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lpx-"))
    # The path of a unix socket has at most 107 bytes.
    if len(str(folder)) > 90:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="lpx-", dir="/tmp"))
    return folder


def _is_speakable(path: Path) -> bool:
    return str(path).isascii() and not any(letter.isspace() for letter in str(path))


def _speakable(path: Path, runtime_folder: Path) -> Path:
    """A path that Triton 2.51 can hand to its stubs: itself, or a link to it.

    It splits their command line at spaces, and their embedded Python takes file names for ASCII.
    """
    if _is_speakable(path):
        return path
    link = runtime_folder / f"link{len(list(runtime_folder.iterdir()))}"
    link.symlink_to(path, target_is_directory=True)
    return link


def _wait_until_loaded(running: RunningServer, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not running.client.is_ready():
        running.raise_if_ended("while it was starting")
        if running.engine_host is not None and not running.engine_host.alive():
            raise ToolError(
                "the engine host ended while the server was starting",
                why="\n".join(logs.last_useful_lines(running.engine_host.log_path)),
                next=f"cat {running.engine_host.log_path}",
            )
        if time.monotonic() > deadline:
            raise running.failure(f"tritonserver was not ready within {timeout:.0f} s")
        time.sleep(0.05)


def _warm_up(client: TritonHttp, prompts: int, timeout: float, running: RunningServer) -> None:
    """Warm-up generations, then one more of each model that clients call, whose answer is looked at."""
    callable_models = [ENSEMBLE, BLS_MODEL] if BLS_MODEL in running.models else [ENSEMBLE]
    for model in [ENSEMBLE] * prompts + callable_models:
        try:
            answer = client.generate(model, {"text_input": WARMUP_TEXT, "max_tokens": WARMUP_TOKENS}, timeout)
        except TritonHttpError as error:
            running.raise_if_ended("at the first generation")
            raise running.failure(
                f"the models are loaded but the first generation of {model} failed: {error}"
            ) from error
        # Never empty, whatever the model says: the prompt is part of it.
        if not answer.get("text_output"):
            raise running.failure(f"{model} answered its first generation without text: {answer}")
