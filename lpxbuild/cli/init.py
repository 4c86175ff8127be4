"""`lpx init`: a first recipe for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lpxbuild.cli.options import Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("init")(init)


def init(
    source: Annotated[str, typer.Argument(help="Hugging Face id, local folder, or .gguf file.")],
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--output", "-o", help="Recipe file to write; default NAME.yaml, named after the model."),
    ] = None,
    revision: Annotated[Optional[str], typer.Option(help="Branch, tag or commit on the hub.")] = None,  # noqa: UP045
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing recipe file.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a first recipe from a model's config."""
    with running(json, quiet) as output:
        from lpxbuild.pipeline.first_recipe import write_first_recipe

        path = write_first_recipe(source, file, revision=revision, force=force, output=output)
        output.result({"recipe": str(path)}, f"wrote {path}\nnext: lpx build {path}")
