"""Model families, one file each: config mapping, weight map, attention features.

A file of this package that defines `FAMILY` is a family; adding one adds it everywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.family import Family, architecture_of
from lpxbuild.families.parallel import check_parallel, stage_layers, tensor_parallel_sizes
from lpxbuild.families.shape import ModelShape, TensorSpec

__all__ = [
    "IGNORED_SUFFIXES",
    "Family",
    "ModelShape",
    "TensorSpec",
    "attention_features",
    "check_parallel",
    "families",
    "family_for",
    "family_named",
    "stage_layers",
    "tensor_parallel_sizes",
]

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached", ".masked_bias")
"""Buffers of old checkpoints that hold nothing learned."""


@lru_cache(maxsize=1)
def families() -> Mapping[str, Family]:
    """All families by name (HF's `model_type`)."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found


def family_named(name: str) -> Family:
    """The family of that name; KeyError for a name that no file declares."""
    return families()[name]


def family_for(hf_config: Mapping[str, Any]) -> Family:
    """The family of a HF config, by `architectures[0]`, else by `model_type`.

    Raises:
        SourceError: names the architecture found and the supported ones.
    """
    architecture, model_type = architecture_of(hf_config), hf_config.get("model_type")
    if isinstance(hf_config.get("text_config"), Mapping):
        raise _nested(architecture, model_type, hf_config["text_config"])
    for family in families().values():
        known = architecture in family.architectures if architecture else model_type == family.name
        if known and model_type in (None, family.name):
            return family
    supported = ", ".join(f"{family.architectures[0]} ({family.name})" for family in families().values())
    raise SourceError(
        f"architecture {architecture} (model_type {model_type}) is not supported",
        why=f"supported: {supported}",
        next="choose a model of one of these families",
    )


def _nested(architecture: str | None, model_type: Any, text: Mapping[str, Any]) -> SourceError:
    inner = text.get("model_type")
    known = [family for family in families().values() if family.name == inner]
    named = f"{known[0].architectures[0]} ({inner})" if known else f"model_type {inner}"
    return SourceError(
        f"architecture {architecture} (model_type {model_type}) is a model of images and text",
        why=f"its text part is a nested {named}; lpx converts models of text alone, and leaves nothing out silently",
        next="give a text-only release of the model, or save its text part as one with transformers (docs/families.md)"
        if known
        else "choose a model of text alone",
    )


def attention_features(shape: ModelShape, max_seq_len: int | None = None) -> tuple[str, ...]:
    """What attention needs beyond plain causal with one scale; empty = plain.

    sliding_window, mixed_layers (only some layers have it), two_rope_bases (those layers turn by another base),
    soft_cap (scores pass through tanh), alibi, long_rope (RoPE factors that change once a sequence grows longer than
    the model was trained for).

    Args:
        shape: the model.
        max_seq_len: longest sequence that will be run; a window that it never leaves is no window, and a length that
            it never passes changes no factors.
    """
    features: list[str] = []
    if shape.sliding_window is not None and (max_seq_len is None or max_seq_len > shape.sliding_window):
        features.append("sliding_window")
        if shape.layer_types is not None:
            features.append("mixed_layers")
    if shape.rotary_local_base is not None:
        features.append("two_rope_bases")
    if shape.attn_softcap is not None:
        features.append("soft_cap")
    if shape.position == "alibi":
        features.append("alibi")
    scaling = shape.rotary_scaling or {}
    if scaling.get("rope_type") in ("longrope", "dynamic") and (
        max_seq_len is None or max_seq_len > scaling["original_max_position_embeddings"]
    ):
        features.append("long_rope")
    return tuple(features)
