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
class MixtureOfExperts:
    """Experts of a sparse MLP.

    Attributes:
        num_experts, top_k: experts of a layer, and how many a token goes to.
        intermediate_size: inner size of one expert.
        renormalize: the weights of the chosen experts are divided by their sum (Mixtral always, Qwen by config).
        shared_intermediate_size: inner size of the expert that every token goes to, behind a sigmoid gate; 0 = none.
        dense_layers: layers that have an ordinary gated MLP of `ModelShape.intermediate_size` instead.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalize: bool = True
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """A checked, normalised HF config.

    Sizes are counts of elements; `dtype` is the source's ("float32", "bfloat16", "float16").
    `hidden_act` is one of silu, gelu (by the error function), gelu_tanh (its tanh approximation), relu.
    `rotary_scaling` is HF's dict with `rope_type` and every number spelled out (None = plain RoPE).
    `sliding_window` counts the current token; it holds for the layers that `layer_types` calls "sliding_attention",
    for every layer where `layer_types` is None. A window that no layer uses is None.

    Attributes:
        norm: "rms", or "layer" (LayerNorm with bias).
        mlp: "gated" (mlp.fc and mlp.gate), "fused" (one mlp.fc = [up; gate]), or "plain" (mlp.fc alone).
        position: "rope", "learned" (a table added to the embedding) or "alibi".
        rotary_pct: share of a head's dimensions that RoPE turns.
        rotary_local_base: RoPE base of the layers with a window, without scaling, where it is another (Gemma 3).
        attention_scale: factor of query times key; None = head_size ** -0.5.
        embedding_multiplier, residual_multiplier: factors of the embedding and of what each block adds.
        logits_divisor: the logits are divided by it.
        attn_softcap, final_softcap: cap * tanh(x / cap) on attention scores and logits; None = none.
        sandwich_norms: norms also behind attention and around the MLP (Gemma 2 and 3).
        parallel_attention: attention and MLP read the same input and are added together (Falcon).
        num_ln_in_parallel_attn: 1 norm for both, or one each.
        moe: the sparse MLP; None = dense in every layer.
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
    norm: str = "rms"
    mlp: str = "gated"
    position: str = "rope"
    rotary_pct: float = 1.0
    rotary_local_base: float | None = None
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    sandwich_norms: bool = False
    parallel_attention: bool = False
    num_ln_in_parallel_attn: int = 1
    moe: MixtureOfExperts | None = None
