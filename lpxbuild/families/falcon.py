"""Falcon: attention and MLP side by side (7B, 40B) or one after the other (RW), RoPE or ALiBi, one tensor for q, k, v.

The new decoder architecture (40B, 180B, Falcon 2) has grouped KV heads, and a norm for each branch unless the config
says one; the older has one KV head (multi_query) or as many as query heads, whatever num_kv_heads says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.family import Family
from lpxbuild.families.reading import flag, positive_int
from lpxbuild.families.rope import plain_rope
from lpxbuild.families.rules import ATTENTION, LAYER, MLP, embedding, fused_qkv, head, linear, norm
from lpxbuild.families.shape import ModelShape

_HF = "transformer.h.{layer}."


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    heads = shape.num_attention_heads
    new = flag(config, "new_decoder_architecture", False)
    kv_heads = 1 if flag(config, "multi_query", True) else heads
    if new:
        kv_heads = positive_int(config, "num_kv_heads", heads)
    if heads % kv_heads:
        raise SourceError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_kv_heads {kv_heads}",
            why="each KV head serves the same number of query heads",
            next="compare config.json with the original repository of the model",
        )
    parallel = flag(config, "parallel_attn", True)
    if new and not parallel:
        raise SourceError(
            "config.json: new_decoder_architecture is true and parallel_attn is false",
            why="transformers' class has no norm for the MLP of such a model",
            next="compare config.json with the original repository of the model",
        )
    # Only the new architecture reads the number of norms; two where the key is absent.
    norms = positive_int(config, "num_ln_in_parallel_attn", 2) if new else 1
    return {
        "num_key_value_heads": kv_heads,
        "parallel_attention": parallel,
        "num_ln_in_parallel_attn": norms,
        "position": "alibi" if flag(config, "alibi", False) else "rope",
    }


def _fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's FalconConfig, whose new_decoder_architecture matters for the number of norms alone."""
    grouped = 1 < shape.num_key_value_heads < shape.num_attention_heads
    new = shape.parallel_attention and (shape.num_ln_in_parallel_attn == 2 or grouped)
    return {
        "bias": shape.qkv_bias,
        "parallel_attention": shape.parallel_attention,
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": shape.num_ln_in_parallel_attn if new else None,
    }


def _rebuild(config: Mapping[str, Any], _shape: ModelShape) -> dict[str, Any]:
    return {
        **dict.fromkeys(("qkv_bias", "dense_bias", "mlp_bias"), config["bias"]),
        "parallel_attention": config["parallel_attention"],
        "num_ln_in_parallel_attn": config["num_ln_in_parallel_attn"] or 1,
    }


def _misfit(shape: ModelShape) -> tuple[str, str] | None:
    if shape.parallel_attention and shape.qkv_bias:
        return (
            "config.json: parallel_attn and bias are both true",
            "TensorRT-LLM's class adds the biases of such a layer once for each rank; no released Falcon has both",
        )
    return None


def _two_norms(shape: ModelShape) -> bool:
    return shape.num_ln_in_parallel_attn == 2


def _one_norm(shape: ModelShape) -> bool:
    return shape.num_ln_in_parallel_attn == 1


def _in_a_row(shape: ModelShape) -> bool:
    return not shape.parallel_attention


FAMILY = Family(
    name="falcon",
    architectures=("FalconForCausalLM",),
    attention=("alibi",),
    keys={"intermediate_size": "ffn_hidden_size"},
    defaults={
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    activations={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    activation_key="activation",
    norm_key="layer_norm_epsilon",
    norm="layer",
    mlp="plain",
    qkv_bias="bias",
    dense_bias="bias",
    mlp_bias="bias",
    rope=plain_rope,
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    misfit=_misfit,
    weights=(
        *embedding("transformer.word_embeddings.weight"),
        *norm(f"{LAYER}input_layernorm", f"{_HF}input_layernorm", bias=True, when=_one_norm),
        *norm(f"{LAYER}input_layernorm", f"{_HF}ln_attn", bias=True, when=_two_norms),
        *norm(f"{LAYER}mlp_layernorm", f"{_HF}ln_mlp", bias=True, when=_two_norms),
        *norm(f"{LAYER}post_layernorm", f"{_HF}post_attention_layernorm", bias=True, when=_in_a_row),
        *fused_qkv(f"{_HF}self_attention.query_key_value", grouped=True, bias="qkv_bias"),
        *linear(
            f"{ATTENTION}dense", f"{_HF}self_attention.dense", "dense", "row", "hidden", "query", bias="dense_bias"
        ),
        *linear(f"{MLP}fc", f"{_HF}mlp.dense_h_to_4h", "fc", "column", "intermediate", "hidden", bias="mlp_bias"),
        *linear(f"{MLP}proj", f"{_HF}mlp.dense_4h_to_h", "proj", "row", "hidden", "intermediate", bias="mlp_bias"),
        *norm("transformer.ln_f", "transformer.ln_f", place="last", bias=True),
        *head(tied="transformer.word_embeddings.weight"),
    ),
)
