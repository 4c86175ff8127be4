"""What `lpx serve` calls: a build folder, or any model repository, behind tritonserver."""

from __future__ import annotations

import hashlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.errors import UsageError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline.cache import default_root
from lpxbuild.pipeline.manifest import PROVEN, Manifest
from lpxbuild.pipeline.workspace import LOGS

REPOSITORY = "repository"


@dataclass(frozen=True)
class Served:
    """What can be served.

    Attributes:
        name: what messages call it.
        repository: the Triton model repository.
        state: folder for the server's status file and logs.
        manifest: of the build; None for a bare repository.
        changed: files of the repository that are not as they were built.
    """

    name: str
    repository: Path
    state: Path
    manifest: Manifest | None
    changed: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """A smoke test of exactly these files has passed."""
        return self.manifest is not None and self.manifest.state == PROVEN and not self.changed


def find(build: Path, cache: Path | None = None) -> Served:
    """A build folder or a model repository; what is kept about a bare repository is in `cache`.

    Raises:
        UsageError: neither; or the build stopped before its repository.
    """
    if (build / manifests.FILE).is_file():
        manifest = manifests.read(build)
        repository = build / REPOSITORY
        if REPOSITORY not in manifest.stages or not repository.is_dir():
            raise UsageError(
                f"{build} has no model repository: it is {manifest.state}",
                next="build the recipe without --to, or with --to repository",
            )
        changed = [one for one in manifests.differences(build, manifest) if one.startswith(f"{REPOSITORY}/")]
        return Served(str(build), repository, build / LOGS, manifest, tuple(changed))
    if (build / "ensemble" / "config.pbtxt").is_file():
        mark = hashlib.sha256(str(build.resolve()).encode()).hexdigest()[:16]
        return Served(str(build), build, (cache or default_root()) / "servers" / mark, None)
    what = "does not exist" if not build.exists() else "is neither a build folder nor a model repository"
    raise UsageError(
        f"{build} {what}",
        why="a build folder has a manifest.json, a model repository has ensemble/config.pbtxt",
        next="lpx build RECIPE   makes build/NAME",
    )


def serve(
    build: Path,
    *,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    address: str,
    log: Path | None,
    detach: bool,
    stop: bool,
    dry_run: bool,
    require_proven: bool,
    cache_dir: Path | None,
    output: Output,
) -> None:
    """Serve until stopped, in the foreground or detached; or stop; or print the command.

    Raises:
        VerdictError: `require_proven`, and it is not.
        LpxError: as `lpxbuild.server.start`.
    """
    from lpxbuild import server
    from lpxbuild.server import serving as lifetime

    if not address.strip():
        raise UsageError("--address is empty", next="--address 127.0.0.1, or 0.0.0.0 for every network of this host")
    _check_distinct({"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port})
    served = find(build, cache_dir)
    if stop:
        if not lifetime.stop(served.state, output=output):
            raise UsageError(f"no server of {build} is running", next=f"lpx serve {shlex.quote(str(build))}")
        output.result({"stopped": str(build)}, f"stopped the server of {build}")
        return
    _say_state(served, require_proven, output)
    settings = server.ServerSettings(
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        address=address,
        **of_the_recipe(served.manifest),
    )
    if dry_run:
        command, environment = server.dry_run(served.repository, settings, output, cache=cache_dir)
        shown = " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in environment.items()), shlex.join(command)]
        )
        output.result({"command": command, "environment": environment}, shown)
        return
    if detach:
        status = lifetime.detach(
            served.repository, state=served.state, settings=settings, log_path=log, cache=cache_dir, output=output
        )
        output.result(status, _addresses(build, status))
        return
    sys.exit(
        lifetime.serve(
            served.repository,
            state=served.state,
            settings=settings,
            log_path=log,
            cache=cache_dir,
            output=output,
            on_ready=lambda _running: output.result(
                status := lifetime.read_status(served.state) or {},
                f"{_addresses(build, status)}\nCtrl-C drains and stops",
            ),
        )
    )


def _check_distinct(ports: dict[str, int]) -> None:
    """Two sockets that do not listen yet may share a port, so binding does not tell."""
    for option, port in ports.items():
        same = [other for other, its in ports.items() if its == port != 0]
        if len(same) > 1:
            raise UsageError(
                f"{' and '.join(same)} are both {port}",
                why="HTTP, gRPC and metrics each need a port of their own",
                next=f"give another {option}; 0 takes a free one",
            )


def _say_state(served: Served, require_proven: bool, output: Output) -> None:
    if served.proven:
        return
    if served.changed:
        why = "; ".join(served.changed[:3]) + (" …" if len(served.changed) > 3 else "")
    elif served.manifest is None:
        why = "a bare model repository carries no manifest"
    else:
        why = f"its state is: {served.manifest.state}"
    if require_proven:
        raise VerdictError(f"{served.name} is not proven", why=why, next="lpx build RECIPE   runs the smoke test")
    output.notice(f"{served.name} is not proven: {why}")


def of_the_recipe(manifest: Manifest | None) -> dict[str, Any]:
    """The `ServerSettings` that the recipe of a build gives; none for a bare repository."""
    if manifest is None:
        return {}
    serve = manifest.data["recipe"]["serve"]
    return {"drain_seconds": serve["drain_seconds"], "warmup_prompts": serve["warmup"]["prompts"]}


def _addresses(build: Path, status: dict[str, Any]) -> str:
    return (
        f"{build}: ready, HTTP {status.get('http_url')}, gRPC {status.get('grpc_url')}, "
        f"metrics {status.get('metrics_url')}\nlog: {status.get('log')}"
    )
