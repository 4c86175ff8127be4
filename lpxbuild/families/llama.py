"""Llama: TensorRT-LLM's LLaMAConfig reads attn_bias and mlp_bias; attention_bias biases o_proj as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family
from lpxbuild.families.shape import ModelShape


def llama_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's LLaMAConfig."""
    return {"attn_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias, "residual_mlp": False}


def biases_of_llama(config: Mapping[str, Any], _shape: ModelShape) -> dict[str, Any]:
    """In TensorRT-LLM's Llama class attn_bias covers the output projection."""
    return {"qkv_bias": config["attn_bias"], "dense_bias": config["attn_bias"], "mlp_bias": config["mlp_bias"]}


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    checked_against="oracle, transformers' logits",
    defaults={"max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
    qkv_bias="attention_bias",
    dense_bias="attention_bias",
    mlp_bias="mlp_bias",
    trtllm_fields=llama_fields,
    rebuild=biases_of_llama,
)
