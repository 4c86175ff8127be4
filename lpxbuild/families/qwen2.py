"""Qwen2: biases on q, k and v that no config key announces; a sliding window only if use_sliding_window says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.family import Family
from lpxbuild.families.reading import flag, positive_int
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.window import FULL, SLIDING, Window, layer_types, window_of


def qwen_window(config: Mapping[str, Any], layers: int) -> Window:
    """transformers' rule: layers from max_window_layers on, or `layer_types`; nothing without use_sliding_window."""
    size = config.get("sliding_window") if flag(config, "use_sliding_window", False) else None
    types = layer_types(config, layers)
    if types is None:
        first = config.get("max_window_layers", 28)
        if size is not None and type(first) is not int:
            raise SourceError(
                f"config.json: max_window_layers is {first!r}",
                why="it names the first layer with a sliding window",
                next="compare config.json with the original repository of the model",
            )
        types = [SLIDING if size is not None and layer >= first else FULL for layer in range(layers)]
    if SLIDING not in types:
        return None, None
    if size is None:
        raise SourceError(
            "config.json: layer_types names sliding_attention, but no sliding window is switched on",
            why="use_sliding_window and sliding_window must be given with it",
            next="compare config.json with the original repository of the model",
        )
    return window_of(types, positive_int(config, "sliding_window"))


def qwen_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's QWenConfig; its model reads qwen_type and seq_length without a default."""
    return {
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "qwen_type": shape.family,
        "seq_length": 8192,
        "use_logn_attn": False,
    }


def biases_of_qwen(config: Mapping[str, Any], _shape: ModelShape) -> dict[str, Any]:
    """In TensorRT-LLM's Qwen class the output projection has no bias."""
    return {"qkv_bias": config["attn_bias"], "mlp_bias": config["mlp_bias"]}


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    attention=("sliding_window", "mixed_layers"),
    checked_against="oracle, transformers' logits",
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    qkv_bias=True,
    window=qwen_window,
    trtllm_fields=qwen_fields,
    rebuild=biases_of_qwen,
)
