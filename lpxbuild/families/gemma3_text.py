"""Gemma 3 (text): a window in all layers but every sixth, which turn by another RoPE base; norms on every head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family, Rope
from lpxbuild.families.gemma import GELU_TANH, gemma_rules
from lpxbuild.families.gemma2 import caps_and_scale, gemma2_fields
from lpxbuild.families.reading import positive_float, positive_int
from lpxbuild.families.rope import read_rope
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.window import FULL, SLIDING, Window, layer_types, window_of


def _window(config: Mapping[str, Any], layers: int) -> Window:
    types = layer_types(config, layers)
    if types is None:
        key = "_sliding_window_pattern" if config.get("_sliding_window_pattern") else "sliding_window_pattern"
        pattern = positive_int(config, key)
        types = [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]
    return window_of(types, positive_int(config, "sliding_window"))


def _rope(config: Mapping[str, Any], default_theta: float, positions: int) -> Rope:
    """transformers 5 gives each type of layer a set of its own; scaling belongs to the layers without a window."""
    return read_rope(_spelled_out(config), default_theta, positions)


def _spelled_out(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get(FULL), Mapping):
        return config
    local = parameters.get(SLIDING)
    theta = local.get("rope_theta") if isinstance(local, Mapping) else None
    return {
        **config,
        "rope_parameters": parameters[FULL],
        **({} if theta is None else {"rope_local_base_freq": theta}),
    }


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    local = positive_float(_spelled_out(config), "rope_local_base_freq")
    return {**_capped(config, shape), "rotary_local_base": local if shape.sliding_window else None}


def _capped(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """transformers' class reads attn_logit_softcapping and does not use it."""
    return {**caps_and_scale(config, shape), "attn_softcap": None}


def _pattern(shape: ModelShape) -> int | None:
    """TensorRT-LLM's way to say which layers have a window: all but every n-th; None where it cannot."""
    layers = shape.num_hidden_layers
    if shape.sliding_window is None:
        return 1
    types = shape.layer_types or (SLIDING,) * layers
    return next(
        (
            pattern
            for pattern in (6, *range(2, layers + 2))
            if all((kind == SLIDING) == bool((layer + 1) % pattern) for layer, kind in enumerate(types))
        ),
        None,
    )


def _misfit(shape: ModelShape) -> tuple[str, str] | None:
    if _pattern(shape) is None:
        return (
            "config.json: the layers without a window in layer_types do not follow each other evenly",
            "TensorRT-LLM knows only a pattern: every n-th layer has none",
        )
    if shape.rotary_scaling is not None and shape.sliding_window is not None:
        return (
            f"config.json: RoPE is scaled ({shape.rotary_scaling['rope_type']}) in the layers without a window only",
            "TensorRT-LLM scales the RoPE of all layers or of none, and the answers would be wrong either way",
        )
    return None


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {
        **gemma2_fields(shape),
        "_sliding_window_pattern": _pattern(shape),
        "sliding_window": shape.sliding_window,
        "rope_local_base_freq": shape.rotary_local_base,
    }


def _rebuild(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    pattern = config["_sliding_window_pattern"]
    types = [SLIDING if (layer + 1) % pattern else FULL for layer in range(shape.num_hidden_layers)]
    window, kinds = (None, None) if config["sliding_window"] is None else window_of(types, config["sliding_window"])
    return {
        **_capped(config, shape),
        "rotary_local_base": config["rope_local_base_freq"],
        "sliding_window": window,
        "layer_types": kinds,
    }


FAMILY = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    attention=("sliding_window", "mixed_layers", "two_rope_bases"),
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    activations=GELU_TANH,
    activation_key="hidden_activation",
    qk_norm=True,
    sandwich_norms=True,
    unrepresentable=("attention_bias", "use_bidirectional_attention"),
    window=_window,
    rope=_rope,
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    misfit=_misfit,
    weights=gemma_rules(sandwich=True, head_norm=True),
    pipeline=False,
    whole=("vocab_size",),
)
