"""What must hold before a server is started: ports, shared memory, the repository, the engine."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.server import processes

# shm-default-byte-size of Triton 2.51: one region per Python instance, grown by as much when tensors need it.
SHM_PER_INSTANCE = 1 << 20
SHM_MARGIN = 8 << 20
OPEN_FILES = 512


@dataclass(frozen=True)
class ServedModel:
    """One model of a repository as the server will see it: number of Python processes, and the steps of an ensemble."""

    name: str
    backend: str
    instances: int
    decoupled: bool
    steps: tuple[str, ...]
    config: Any


def models(repository: Path) -> dict[str, ServedModel]:
    """Read every config.pbtxt of a model repository.

    Raises:
        SourceError: not a repository, or a config that Triton's own parser refuses.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    files = sorted(repository.glob("*/config.pbtxt"))
    if not files:
        raise SourceError(
            f"{repository} is not a Triton model repository",
            why="it holds no MODEL/config.pbtxt",
            next="lpx build RECIPE --to repository",
        )
    found = {}
    for file in files:
        config = model_config_pb2.ModelConfig()
        try:
            text_format.Parse(file.read_text(encoding="utf-8"), config)
        except (text_format.ParseError, UnicodeDecodeError, OSError) as error:
            raise SourceError(
                f"{file}: {error}", why="Triton would refuse this model", next="lpx build RECIPE --to repository"
            ) from error
        steps = tuple(step.model_name for step in config.ensemble_scheduling.step)
        instances = sum(max(group.count, 1) for group in config.instance_group) or 1
        found[file.parent.name] = ServedModel(
            name=file.parent.name,
            backend=config.backend,
            instances=0 if steps else instances,
            decoupled=config.model_transaction_policy.decoupled,
            steps=steps,
            config=config,
        )
    return found


def check_repository(repository: Path) -> None:
    """Refuse a repository in which a finding of `lpxbuild.repository.validate` stands."""
    from lpxbuild.repository import validate

    findings = [str(finding) for finding in validate(repository)]
    if findings:
        raise SourceError(
            f"{repository} is not valid: {findings[0]}",
            why="; ".join(findings[1:]) or "found by lpx before the server was started",
            next="lpx build RECIPE --to repository",
        )


def check_engine(repository: Path) -> None:
    """Refuse an engine folder that is missing, incomplete or unreadable, naming the file."""
    engine = repository / "tensorrt_llm" / "1" / "engine"
    if not (repository / "tensorrt_llm" / "1" / "engine_host.py").exists():
        return  # an engine of another backend, or none at all
    try:
        description = json.loads((engine / "engine.json").read_text(encoding="utf-8"))
        for name in ("openvino_model.xml", "openvino_model.bin"):
            with (engine / name).open("rb") as file:
                if not file.read(1):
                    raise ValueError(f"{name} is empty")
    except OSError as error:
        raise SourceError(
            f"the engine cannot be read: {error.filename or engine}: {error.strerror}", next="lpx build RECIPE"
        ) from error
    except ValueError as error:
        raise SourceError(f"the engine in {engine} is damaged: {error}", next="lpx build RECIPE --force") from error
    if description.get("format_version") != 1:
        raise SourceError(
            f"{engine}/engine.json has format_version {description.get('format_version')!r}",
            why="this version of lpx reads format_version 1",
            next="lpx build RECIPE",
        )
    check_cache_memory(int(description.get("scheduler", {}).get("cache_size_bytes", 0)))


def check_cache_memory(wanted: int, *, available: int | None = None) -> None:
    """Refuse a KV cache that this host cannot hold; OpenVINO would fail in its own words.

    Args:
        wanted: bytes of the cache.
        available: bytes; None asks the host.
    """
    from lpxbuild.memory import available_memory, gigabytes

    free = available_memory() if available is None else available
    if wanted > free:
        raise HostError(
            f"the engine's KV cache of {gigabytes(wanted)} is larger than the {gigabytes(free)} of free memory",
            why="runtime.kv_cache_gib of the recipe says how large it is",
            next=f"build with --set runtime.kv_cache_gib={max(free / 2**31, 0.01):.2g}",
        )


def check_shared_memory(served: dict[str, ServedModel], *, folder: Path = processes.SHARED_MEMORY) -> None:
    """Every Python instance maps 1 MiB of /dev/shm; with too little Triton 2.51 crashes in place of an error.

    Raises:
        HostError: naming what is needed, what is free, and the option of docker.
    """
    instances = sum(model.instances for model in served.values())
    needed = instances * SHM_PER_INSTANCE + SHM_MARGIN
    try:
        statistics = os.statvfs(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(0, "it cannot be written")
    except OSError as error:
        raise HostError(f"{folder} cannot be used: {error.strerror}", next="mount a tmpfs there") from error
    free = statistics.f_bavail * statistics.f_frsize
    if free < needed:
        raise HostError(
            f"{folder} is too small: {needed >> 20} MiB needed, {free >> 20} MiB free",
            why=f"{instances} model instances with 1 MiB each, and {SHM_MARGIN >> 20} MiB for tensors",
            next=f"docker run --shm-size={max(needed >> 20, 64)}m …, or mount -o remount,size={needed >> 20}m {folder}",
        )


def check_open_files() -> None:
    """With too few file descriptors Triton waits for ever; the limit is raised as far as this user may.

    Raises:
        HostError: the hard limit is too low.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
            raise HostError(
                f"only {hard} open files are allowed, {OPEN_FILES} are needed",
                why="ulimit -n, its hard limit",
                next=f"raise it: ulimit -Hn {OPEN_FILES}, LimitNOFILE= of the unit, or docker run --ulimit nofile=1024",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def choose_ports(wanted: dict[str, int], address: str) -> dict[str, int]:
    """Ports for http, grpc and metrics: a given one is checked, 0 becomes a free one.

    Raises:
        HostError: a given port is in use (the message names the port and its holder), or the address is not ours.
    """
    chosen: dict[str, int] = {}
    sockets = []
    try:
        # The given ones first, so that a free one never takes their place; all stay bound until the end.
        for name, port in sorted(wanted.items(), key=lambda item: item[1] == 0):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            probe = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(probe)
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except (OSError, OverflowError) as error:
                raise _port_error(name, port, address, error) from error
            chosen[name] = probe.getsockname()[1]
    finally:
        for probe in sockets:
            probe.close()
    return chosen


def _port_error(name: str, port: int, address: str, error: Exception) -> HostError:
    import errno

    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        holder = processes.port_holder(port)
        return HostError(
            f"port {port} ({name}) is in use" + (f" by {holder}" if holder else ""),
            why="lpx starts a server only on ports that it can have for itself",
            next=f"stop that process, or choose another port: --{name}-port 0 takes a free one",
        )
    return HostError(f"cannot listen on {address} port {port} ({name}): {error}", next="--address 127.0.0.1")
