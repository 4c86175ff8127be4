"""`lpx serve`: a build behind tritonserver."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lpxbuild.cli.options import CacheFolder, Json, Quiet
from lpxbuild.cli.running import running

LAST_PORT = 65535


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("serve")(serve)


def serve(
    build: Annotated[Path, typer.Argument(help="Build folder (build/NAME) or model repository.")],
    http_port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="HTTP port; 0 = a free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="gRPC port; 0 = a free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=LAST_PORT, help="Metrics port; 0 = a free one.")] = 8002,
    address: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    log: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--log", help="Log of tritonserver; default: in the build folder."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the server is ready; stop it with --stop.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Drain and stop the detached server of this build.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the exact command and stop.")] = False,
    require_proven: Annotated[
        bool, typer.Option("--require-proven", help="Refuse a build that is not proven.")
    ] = False,
    cache_dir: CacheFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Serve a build on the embedded tritonserver."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.serving import serve as run

        run(
            build,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            address=address,
            log=log,
            detach=detach,
            stop=stop,
            dry_run=dry_run,
            require_proven=require_proven,
            cache_dir=cache_dir,
            output=output,
        )
