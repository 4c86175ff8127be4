"""Gemma 2: a window in every other layer (the first has one), capped scores and logits, a scale of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family
from lpxbuild.families.gemma import GELU_TANH, gemma_fields, gemma_rules, scaled_embedding
from lpxbuild.families.reading import positive_float, positive_int
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.window import FULL, SLIDING, Window, layer_types, window_of


def _window(config: Mapping[str, Any], layers: int) -> Window:
    if config["sliding_window"] is None:
        return None, None
    types = layer_types(config, layers) or [FULL if layer % 2 else SLIDING for layer in range(layers)]
    return window_of(types, positive_int(config, "sliding_window"))


def caps_and_scale(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """query_pre_attn_scalar and the two caps, which have the same names in both configs; null = no cap."""
    return {
        **scaled_embedding(config, shape),
        "attention_scale": positive_float(config, "query_pre_attn_scalar") ** -0.5,
        "attn_softcap": _cap(config, "attn_logit_softcapping"),
        "final_softcap": _cap(config, "final_logit_softcapping"),
    }


def _cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else positive_float(config, key)


def query_pre_attn_scalar(shape: ModelShape) -> float:
    """The number whose inverse square root is the attention scale; whole in all released models."""
    scalar = (shape.attention_scale or shape.head_size**-0.5) ** -2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar


def gemma2_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's GemmaConfig for Gemma 2."""
    return {
        **gemma_fields(shape),
        "inter_layernorms": True,
        "query_pre_attn_scalar": query_pre_attn_scalar(shape),
        "attn_logit_softcapping": shape.attn_softcap,
        "final_logit_softcapping": shape.final_softcap,
    }


FAMILY = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    attention=("sliding_window", "mixed_layers", "soft_cap"),
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    activations=GELU_TANH,
    activation_key="hidden_activation",
    sandwich_norms=True,
    unrepresentable=("attention_bias",),
    window=_window,
    further=caps_and_scale,
    trtllm_fields=gemma2_fields,
    rebuild=caps_and_scale,
    weights=gemma_rules(sandwich=True),
    pipeline=False,
    whole=("vocab_size",),
)
