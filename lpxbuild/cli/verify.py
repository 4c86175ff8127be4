"""`lpx verify`: a build compared with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lpxbuild.cli.options import CacheFolder, Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("verify")(verify)


def verify(
    build: Annotated[Path, typer.Argument(help="Build folder.")],
    recipe: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--recipe", help="The build's recipe file, where its relative paths start from."),
    ] = None,
    html: Annotated[Optional[Path], typer.Option("--html", help="Also write the HTML report there.")] = None,  # noqa: UP045
    cache_dir: CacheFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare a build's numbers with its source in transformers, module by module; a negative verdict exits 1."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.verifying import verify as run

        run(build, recipe_path=recipe, html=html, cache_dir=cache_dir, output=output)
