"""What lpx needs to know of a model's config.json, under one set of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that the source is expected to hold: its shape, and whether the model can do without it."""

    shape: tuple[int, ...]
    required: bool = True


@dataclass(frozen=True)
class ModelShape:
    """A checked, normalised HF config.

    Sizes are counts of elements; `dtype` is the source's ("float32", "bfloat16", "float16").
    `rotary_scaling` is HF's dict with `rope_type` and every number spelled out (None = plain RoPE).
    `sliding_window` counts the current token; it holds for the layers that `layer_types` calls "sliding_attention",
    for every layer where `layer_types` is None. A window that no layer uses is None.
    """

    family: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    hidden_act: str
    rotary_base: float
    rotary_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    dtype: str
    qkv_bias: bool = False
    dense_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
