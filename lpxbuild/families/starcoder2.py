"""StarCoder 2: LayerNorm, RoPE, grouped heads, one MLP branch, biases by use_bias; a window for all layers or none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import GELU, Family
from lpxbuild.families.rules import ATTENTION, HF, LAYER, MLP, embedding, head, linear, norm, separate_qkv
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.window import one_window


def _fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's GPTConfig."""
    return {"gpt_variant": "starcoder2", "bias": shape.qkv_bias, "q_scaling": 1.0}


def _rebuild(config: Mapping[str, Any], _shape: ModelShape) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "dense_bias", "mlp_bias"), config["bias"])


FAMILY = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    attention=("sliding_window",),
    defaults={
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    activations={"gelu_pytorch_tanh": "gelu_tanh", **GELU},
    norm_key="norm_epsilon",
    norm="layer",
    mlp="plain",
    qkv_bias="use_bias",
    dense_bias="use_bias",
    mlp_bias="use_bias",
    window=one_window,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    weights=(
        *embedding(),
        *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm", bias=True),
        *separate_qkv(bias="qkv_bias"),
        *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query", bias="dense_bias"),
        *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm", bias=True),
        *linear(f"{MLP}fc", f"{HF}mlp.c_fc", "fc", "column", "intermediate", "hidden", bias="mlp_bias"),
        *linear(f"{MLP}proj", f"{HF}mlp.c_proj", "proj", "row", "hidden", "intermediate", bias="mlp_bias"),
        *norm("transformer.ln_f", "model.norm", place="last", bias=True),
        *head(),
    ),
)
