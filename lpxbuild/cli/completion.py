"""What a shell offers behind `lpx build`; called by the shell's completion only, so it may import what it needs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def recipes(incomplete: str) -> list[str]:
    """Names of shipped recipes, recipe files, and folders on the way to some."""
    from lpxbuild.recipe.library import shipped_recipes

    names = [entry.name for entry in shipped_recipes()]
    folder, _, last = incomplete.rpartition("/")
    try:
        beside = sorted(path for path in Path(folder or ("/" if "/" in incomplete else ".")).iterdir())
    except OSError:
        beside = []
    prefix = incomplete[: len(incomplete) - len(last)]
    for path in beside:
        if path.suffix in (".yaml", ".yml"):
            names.append(prefix + path.name)
        elif path.is_dir() and not path.name.startswith("."):
            names.append(f"{prefix}{path.name}/")
    return _beginning(incomplete, names)


def stages(incomplete: str) -> list[str]:
    """What `--to` takes."""
    from lpxbuild.pipeline.stages import TARGETS

    return _beginning(incomplete, TARGETS)


def backends(incomplete: str) -> list[str]:
    """What `--backend` takes."""
    from typing import get_args

    from lpxbuild.recipe.schema import Backend

    return _beginning(incomplete, get_args(Backend))


def shipped(incomplete: str) -> list[str]:
    """Names of shipped recipes."""
    from lpxbuild.recipe.library import shipped_recipes

    return _beginning(incomplete, (entry.name for entry in shipped_recipes()))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
