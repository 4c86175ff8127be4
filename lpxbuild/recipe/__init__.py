"""The recipe: schema, loading with line numbers, generated reference, first recipe for a model."""

from __future__ import annotations

from lpxbuild.recipe.schema import Recipe

__all__ = ["Recipe"]
