"""From a recipe to a proven build: stages, cache, manifest, lock.

`build` runs what has to run, `why` says what would; both are plain functions for use from Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lpxbuild.pipeline.building import BuildResult, build
    from lpxbuild.pipeline.cache import Cache
    from lpxbuild.pipeline.explaining import why

_PLACES = {"BuildResult": "building", "build": "building", "Cache": "cache", "why": "explaining"}
__all__ = ["BuildResult", "Cache", "build", "why"]


def __getattr__(name: str) -> Any:
    # On demand: `lpx cache ls` needs no recipe.
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"lpxbuild.pipeline.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
