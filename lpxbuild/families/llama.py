"""Llama: TensorRT-LLM's LLaMAConfig reads attn_bias and mlp_bias; attention_bias biases o_proj as well."""

from __future__ import annotations

from typing import Any

from lpxbuild.families.family import Family
from lpxbuild.families.shape import ModelShape


def llama_fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's LLaMAConfig."""
    return {"attn_bias": shape.qkv_bias, "mlp_bias": shape.mlp_bias, "residual_mlp": False}


FAMILY = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    defaults={"max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6},
    qkv_bias="attention_bias",
    dense_bias="attention_bias",
    mlp_bias="mlp_bias",
    trtllm_fields=llama_fields,
)
