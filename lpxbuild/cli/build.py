"""`lpx build`: recipe → proven build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lpxbuild.cli import completion
from lpxbuild.cli.options import BuildFolder, CacheFolder, Json, Overrides, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("build")(build)


def build(
    recipe: Annotated[
        str, typer.Argument(help="Recipe file, or the name of a shipped recipe.", autocompletion=completion.recipes)
    ],
    to: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--to",
            metavar="STAGE",
            help="Stop after STAGE: source, calibration, checkpoint, engine, repository.",
            autocompletion=completion.stages,
        ),
    ] = None,
    backend: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--backend", help="Override the recipe's backend.", autocompletion=completion.backends),
    ] = None,
    overrides: Overrides = None,
    why: Annotated[
        bool, typer.Option("--why", help="Say what would run, and which input changed; do nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Run every stage again.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Refuse any drift from the recipe's lock file.")] = False,
    paranoid: Annotated[bool, typer.Option("--paranoid", help="Hash every artifact in full.")] = False,
    build_dir: BuildFolder = Path("build"),
    cache_dir: CacheFolder = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn a recipe into a proven build: source, calibration, checkpoint, engine, repository, verify, smoke test."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.command import build as run

        run(
            recipe,
            to=to,
            overrides=[*(overrides or []), *([f"backend={backend}"] if backend else [])],
            why=why,
            force=force,
            locked=locked,
            paranoid=paranoid,
            build_dir=build_dir,
            cache_dir=cache_dir,
            output=output,
        )
