"""The recipes that ship with lpx."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from lpxbuild.errors import UsageError
from lpxbuild.shipped import shipped


@dataclass(frozen=True)
class ShippedRecipe:
    """Name, one line of title (the recipe's first comment), file."""

    name: str
    title: str
    path: Path


def shipped_recipes() -> list[ShippedRecipe]:
    """All shipped recipes, by name."""
    found = []
    for path in sorted(shipped("recipes").glob("*.yaml")):
        comments = (line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        title = next((line for line in comments if not line.startswith("yaml-language-server")), "")
        found.append(ShippedRecipe(path.stem, title, path))
    return found


def find(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        UsageError: no such recipe; names the nearest.
    """
    entries = {entry.name: entry.path for entry in shipped_recipes()}
    if name in entries:
        return entries[name]
    near = difflib.get_close_matches(name, entries, n=1) or [entry for entry in entries if entry.startswith(name)]
    raise UsageError(
        f"no shipped recipe is called {name}",
        why=f"shipped are: {', '.join(entries)}",
        next=f"lpx recipes {near[0]}" if near else "lpx recipes",
    )
