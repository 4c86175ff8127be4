"""Granite (dense): Llama with four multipliers.

transformers multiplies scores by attention_multiplier alone; TensorRT-LLM's field of that name is a factor on top of
1 / √head_size, and 1 / logits_scaling is its output_multiplier_scale.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family
from lpxbuild.families.llama import biases_of_llama, llama_fields
from lpxbuild.families.reading import positive_float
from lpxbuild.families.shape import ModelShape


def _further(config: Mapping[str, Any], _shape: ModelShape) -> dict[str, Any]:
    return {
        "attention_scale": positive_float(config, "attention_multiplier"),
        "embedding_multiplier": positive_float(config, "embedding_multiplier"),
        "residual_multiplier": positive_float(config, "residual_multiplier"),
        "logits_divisor": positive_float(config, "logits_scaling"),
    }


def _fields(shape: ModelShape) -> dict[str, Any]:
    scale = shape.head_size**-0.5 if shape.attention_scale is None else shape.attention_scale
    return {
        **llama_fields(shape),
        "attention_multiplier": scale * math.sqrt(shape.head_size),
        "embedding_multiplier": shape.embedding_multiplier,
        "residual_multiplier": shape.residual_multiplier,
        "output_multiplier_scale": 1 / shape.logits_divisor,
    }


def _rebuild(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {
        **biases_of_llama(config, shape),
        "attention_scale": config["attention_multiplier"] / math.sqrt(shape.head_size),
        "embedding_multiplier": config["embedding_multiplier"],
        "residual_multiplier": config["residual_multiplier"],
        "logits_divisor": 1 / config["output_multiplier_scale"],
    }


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    defaults={
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
    },
    qkv_bias="attention_bias",
    dense_bias="attention_bias",
    mlp_bias="mlp_bias",
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
)
