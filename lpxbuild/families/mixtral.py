"""Mixtral: Mistral's attention, and in every layer experts whose weights for a token are divided by their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.experts import moe_fields, rebuilt, routed, sparse_mlp
from lpxbuild.families.family import Family
from lpxbuild.families.llama import biases_of_llama, llama_fields
from lpxbuild.families.rules import ATTENTION, HF, LAYER, embedding, head, linear, norm, separate_qkv
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.window import one_window


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {"moe": routed(config, "num_local_experts", shape.intermediate_size, renormalize=True)}


def _fields(shape: ModelShape) -> dict[str, Any]:
    assert shape.moe is not None
    return {**llama_fields(shape), "moe": moe_fields(shape.moe)}


def _rebuild(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    return {**biases_of_llama(config, shape), "moe": rebuilt(config, shape.intermediate_size)}


FAMILY = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    checked_against="oracle, transformers' logits",
    attention=("sliding_window",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    window=one_window,
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    weights=(
        *embedding(),
        *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm"),
        *separate_qkv(),
        *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query"),
        *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm"),
        # Mistral's names: w1 is activated, w3 multiplies it, w2 leads back.
        *sparse_mlp(
            f"{HF}block_sparse_moe.gate", f"{HF}block_sparse_moe.experts.{{expert}}", gate="w1", up="w3", down="w2"
        ),
        *norm("transformer.ln_f", "model.norm", place="last"),
        *head(),
    ),
)
