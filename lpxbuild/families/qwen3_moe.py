"""Qwen3-MoE: Qwen3's attention with a norm on each query and key head, and experts without a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.experts import (
    dense_mlp,
    qwen_experts,
    qwen_moe_fields,
    qwen_moe_window,
    qwen_rebuilt,
    sparse_mlp,
)
from lpxbuild.families.family import Family
from lpxbuild.families.qwen2 import biases_of_qwen, qwen_fields
from lpxbuild.families.rules import ATTENTION, HF, LAYER, embedding, head, head_norms, linear, norm, separate_qkv
from lpxbuild.families.shape import ModelShape


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {"moe": qwen_experts(config, shape, shared=False)}


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {**qwen_fields(shape), **qwen_moe_fields(shape)}


def _rebuild(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {**biases_of_qwen(config, shape), "moe": qwen_rebuilt(config)}


FAMILY = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    attention=("sliding_window",),
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
    },
    qk_norm=True,
    # TensorRT-LLM sets attn_bias false for qwen3_moe whatever the config says.
    unrepresentable=("attention_bias",),
    window=qwen_moe_window,
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    weights=(
        *embedding(),
        *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm"),
        *separate_qkv(),
        *head_norms(),
        *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query"),
        *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm"),
        *dense_mlp(),
        *sparse_mlp(f"{HF}mlp.gate", f"{HF}mlp.experts.{{expert}}", gate="gate_proj", up="up_proj", down="down_proj"),
        *norm("transformer.ln_f", "model.norm", place="last"),
        *head(),
    ),
)
