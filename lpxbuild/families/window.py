"""Sliding windows of attention as configs spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.reading import positive_int

Window = tuple["int | None", "tuple[str, ...] | None"]
"""Tokens that a layer sees, itself included, and the type of each layer; (None, None) = no window anywhere."""
SLIDING, FULL = "sliding_attention", "full_attention"


def one_window(config: Mapping[str, Any], _layers: int) -> Window:
    """One window for all layers; null or no key means none."""
    if config.get("sliding_window") is None:
        return None, None
    return positive_int(config, "sliding_window"), None


def layer_types(config: Mapping[str, Any], layers: int) -> list[str] | None:
    """`layer_types` as given, None where the config has none.

    Raises:
        SourceError: not one known type for each layer.
    """
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list):
        raise SourceError(
            f"config.json: layer_types is {types!r}",
            why=f"a list of {layers} kinds is needed, one for each layer",
            next="compare config.json with the original repository of the model",
        )
    unknown = sorted({str(kind) for kind in types} - {SLIDING, FULL})
    if len(types) != layers or unknown:
        raise SourceError(
            f"config.json: layer_types has {len(types)} entries"
            + (f", among them {', '.join(unknown)}" if unknown else ""),
            why=f"one of {FULL}, {SLIDING} for each of the {layers} layers is needed",
            next="compare config.json with the original repository of the model",
        )
    return types


def window_of(types: list[str], size: int) -> Window:
    """Types of all layers with the window that the sliding ones have, in the shortest form."""
    if SLIDING not in types:
        return None, None
    return size, tuple(types) if FULL in types else None
