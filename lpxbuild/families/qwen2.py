"""Qwen2: biases on q, k and v that no config key announces; a sliding window only if use_sliding_window says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.family import Family, Window
from lpxbuild.families.reading import flag, positive_int
from lpxbuild.families.shape import ModelShape


def qwen_window(config: Mapping[str, Any], layers: int) -> Window:
    """transformers' rule: layers from max_window_layers on, or `layer_types`; nothing without use_sliding_window."""
    size = config.get("sliding_window") if flag(config, "use_sliding_window", False) else None
    types = config.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise SourceError(
            f"config.json: layer_types is {types!r}",
            why=f"a list of {layers} kinds is needed, one for each layer",
            next="compare config.json with the original repository of the model",
        )
    if types is None:
        first = config.get("max_window_layers", 28)
        if size is not None and type(first) is not int:
            raise SourceError(
                f"config.json: max_window_layers is {first!r}",
                why="it names the first layer with a sliding window",
                next="compare config.json with the original repository of the model",
            )
        types = [
            "sliding_attention" if size is not None and layer >= first else "full_attention" for layer in range(layers)
        ]
    unknown = sorted({str(kind) for kind in types} - {"sliding_attention", "full_attention"})
    if len(types) != layers or unknown:
        raise SourceError(
            f"config.json: layer_types has {len(types)} entries"
            + (f", among them {', '.join(unknown)}" if unknown else ""),
            why=f"one of full_attention, sliding_attention for each of the {layers} layers is needed",
            next="compare config.json with the original repository of the model",
        )
    if "sliding_attention" not in types:
        return None, None
    if size is None:
        raise SourceError(
            "config.json: layer_types names sliding_attention, but no sliding window is switched on",
            why="use_sliding_window and sliding_window must be given with it",
            next="compare config.json with the original repository of the model",
        )
    window = positive_int(config, "sliding_window")
    return window, tuple(types) if "full_attention" in types else None


def qwen_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's QWenConfig; its model reads qwen_type and seq_length without a default."""
    return {
        "attn_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "qwen_type": shape.family,
        "seq_length": 8192,
        "use_logn_attn": False,
    }


FAMILY = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    defaults={
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    qkv_bias=True,
    window=qwen_window,
    trtllm_fields=qwen_fields,
)
