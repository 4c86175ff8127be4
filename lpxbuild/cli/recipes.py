"""`lpx recipes`: the recipes that ship with lpx."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from lpxbuild.cli import completion
from lpxbuild.cli.options import Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("recipes")(recipes)


def recipes(
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Print this recipe's text.", autocompletion=completion.shipped),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the shipped recipes, or print one."""
    with running(json, quiet) as output:
        from lpxbuild.recipe.library import find, shipped_recipes

        if name is not None:
            path = find(name)
            text = path.read_text(encoding="utf-8")
            output.result({"name": name, "path": str(path), "text": text}, text)
            return
        entries = shipped_recipes()
        table = output.table(("NAME", "WHAT"), [(entry.name, entry.title) for entry in entries])
        output.result(
            {"recipes": [{"name": entry.name, "title": entry.title, "path": str(entry.path)} for entry in entries]},
            f"{table}\n\nlpx recipes NAME > my.yaml   prints one;   lpx build NAME   builds one",
        )
