"""Gemma: norms around one (stored plus one), an embedding scaled by √hidden_size, heads of 256 unless given.

Configs of the first release say hidden_act "gelu" and mean its tanh approximation, which TensorRT-LLM runs for every
gelu; `hidden_activation` replaces the key in later ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family
from lpxbuild.families.rules import (
    ATTENTION,
    HF,
    LAYER,
    Rules,
    embedding,
    gated_mlp,
    head,
    head_norms,
    linear,
    norm,
    separate_qkv,
)
from lpxbuild.families.shape import ModelShape

GELU_TANH = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu_tanh", "gelu_new": "gelu_tanh"}


def gemma_rules(*, sandwich: bool, head_norm: bool = False) -> Rules:
    """Llama's names with norms plus one; Gemma 2 and 3 have norms behind attention and around the MLP as well."""
    return (
        *embedding(),
        *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm", plus_one=True),
        *separate_qkv(),
        *(head_norms(plus_one=True) if head_norm else ()),
        *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query"),
        *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm", plus_one=True),
        *(
            (
                *norm(f"{LAYER}pre_feedforward_layernorm", f"{HF}pre_feedforward_layernorm", plus_one=True),
                *norm(f"{LAYER}post_feedforward_layernorm", f"{HF}post_feedforward_layernorm", plus_one=True),
            )
            if sandwich
            else ()
        ),
        *gated_mlp(),
        *norm("transformer.ln_f", "model.norm", place="last", plus_one=True),
        *head(),
    )


def scaled_embedding(_config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    """The network multiplies the embedding; the table itself is stored as it is."""
    return {"embedding_multiplier": math.sqrt(shape.hidden_size)}


def gemma_fields(_shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's GemmaConfig."""
    return {"attn_bias": False, "mlp_bias": False}


FAMILY = Family(
    name="gemma",
    architectures=("GemmaForCausalLM",),
    checked_against="oracle, transformers' logits",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    activations=GELU_TANH,
    unrepresentable=("attention_bias",),
    further=scaled_embedding,
    trtllm_fields=gemma_fields,
    rebuild=scaled_embedding,
    weights=gemma_rules(sandwich=False),
    pipeline=False,
    whole=("vocab_size",),
)
