"""Where a recipe's lock file lies, and what a build does with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import lock as locks
from lpxbuild.pipeline.lock import Lock, refuse_drift
from lpxbuild.pipeline.placing import write_atomically

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe

NAME = "recipe.lock"

__all__ = ["Lock", "place", "read_for", "refuse_drift", "renewed", "revision", "save"]


def place(recipe_path: Path | None, build: Path) -> Path:
    """Beside the recipe; in the build folder for a shipped recipe, and for one that has no file."""
    if recipe_path is None:
        return build / NAME
    from lpxbuild.shipped import shipped

    if recipe_path.resolve().parent == shipped("recipes").resolve():
        return build / NAME
    return recipe_path.with_suffix(".lock")


def read_for(path: Path, recipe: Recipe, *, required: bool) -> Lock | None:
    """The lock for this recipe; None when there is none.

    Raises:
        UsageError: none is there but `required`.
    """
    found = locks.read(path)
    if found is None and required:
        raise UsageError(
            f"--locked: there is no {path}", why="it is written by a build without --locked", next="lpx build RECIPE"
        )
    if found is not None and not required and not found.fits(recipe.model.source, recipe.model.revision):
        return Lock(recipe.model.source, recipe.model.revision, versions=found.versions)
    return found


def revision(recipe: Recipe, pinned: Lock | None) -> str | None:
    """The revision to fetch: the pinned commit where there is one, else the recipe's."""
    if pinned is not None and pinned.commit and pinned.fits(recipe.model.source, recipe.model.revision):
        return pinned.commit
    return recipe.model.revision


def renewed(
    pinned: Lock | None, recipe: Recipe, commit: str | None, files: Mapping[str, str], versions: Mapping[str, str]
) -> Lock:
    """The lock as this build would write it; versions of stages that it did not run stay pinned."""
    old = pinned.versions if pinned is not None else {}
    return replace(
        Lock(recipe.model.source, recipe.model.revision),
        commit=commit,
        files=dict(files),
        versions={**old, **versions},
    )


def save(path: Path, lock: Lock, output: Output) -> None:
    """Write the lock if it says something new; a folder that cannot be written is only noticed."""
    text = locks.text(lock)
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except PermissionError as error:
        output.notice(f"{path} could not be written ({error.strerror}); nothing is pinned for later builds")
