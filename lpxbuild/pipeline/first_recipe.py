"""What `lpx init` calls: a first recipe from a model's config."""

from __future__ import annotations

import os
from pathlib import Path

from lpxbuild.errors import HostError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline.placing import write_atomically
from lpxbuild.pipeline.source_input import SourceInput, resolve


def write_first_recipe(source: str, file: Path | None, *, revision: str | None, force: bool, output: Output) -> Path:
    """Write a recipe for `source` and return its path.

    Args:
        source: as `model.source` in a recipe, relative to the current folder.
        file: where to write; None names it after the model, in the current folder.

    Raises:
        UsageError: the file exists and `force` is not given.
        SourceError, HostError: as the source stage.
    """
    from lpxbuild.families import family_for
    from lpxbuild.recipe.first import first_recipe, recipe_name
    from lpxbuild.recipe.reference import SCHEMA_NAME
    from lpxbuild.shipped import shipped
    from lpxbuild.source.glance import glance

    path = file if file is not None else Path(f"{recipe_name(source)}.yaml")
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a file", why="a recipe is a file", next="give --output FILE")
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists", why="lpx init overwrites nothing by itself", next="give --output FILE, or --force"
        )
    given = resolve(source, revision, base=Path.cwd())
    output.step(f"source: reading the config of {source}")
    seen = glance(given.location, revision, hub=given.kind == "hub")
    family_for(seen.config)
    text = first_recipe(
        _as_written_in(path.absolute().parent, given),
        seen.config,
        revision=seen.commit,
        chat=seen.chat,
        schema=(shipped("recipes") / SCHEMA_NAME).as_uri(),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        raise HostError(f"{path} cannot be written: {error.strerror}", next="give --output FILE") from error
    return path


def _as_written_in(folder: Path, given: SourceInput) -> str:
    """`model.source` as the recipe's folder sees it: relative sources start there."""
    if (
        given.kind == "hub"
        or given.origin.startswith("python-package:")
        or Path(given.origin).expanduser().is_absolute()
    ):
        return given.origin
    relative = os.path.relpath(given.location, folder)
    return relative if relative.startswith("..") else f"./{relative}"
