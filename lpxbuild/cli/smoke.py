"""`lpx smoke`: evidence from a running server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lpxbuild.cli.options import CacheFolder, Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("smoke")(smoke)


def smoke(
    target: Annotated[
        str,
        typer.Argument(help="Build folder (its own server is started and stopped), or the HTTP address of a server."),
    ],
    grpc: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--grpc", metavar="HOST:PORT", help="gRPC address; default: the HTTP port + 1."),
    ] = None,
    build: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--build", help="Build that the server at this address serves: adds its prompts and metadata."),
    ] = None,
    junit: Annotated[Optional[Path], typer.Option("--junit", help="Also write JUnit XML.")] = None,  # noqa: UP045
    cache_dir: CacheFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Smoke-test a served model over HTTP and gRPC; any failure exits 1, and takes the proof from the build tested."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.smoking import smoke as run

        run(target, grpc=grpc, build=build, junit=junit, cache_dir=cache_dir, output=output)
