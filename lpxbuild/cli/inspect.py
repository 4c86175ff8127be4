"""`lpx inspect`: what a folder or file is, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lpxbuild.cli.options import Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("inspect")(inspect)


def inspect(
    path: Annotated[
        Path, typer.Argument(help="Recipe, model folder, checkpoint, engine, model repository or build folder.")
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say what a file or folder is and what it holds."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.inspection import inspect_path

        found = inspect_path(path, output=output)
        output.result(found.data, found.text)
