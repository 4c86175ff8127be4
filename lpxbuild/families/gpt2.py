"""GPT-2: learned positions, LayerNorm, biases everywhere; its Conv1D modules hold weights as (in, out)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import GELU, Family
from lpxbuild.families.reading import flag
from lpxbuild.families.rope import no_rope
from lpxbuild.families.rules import ATTENTION, LAYER, MLP, embedding, fused_qkv, head, linear, norm
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.weights import Part, WeightRule

_HF = "transformer.h.{layer}."


def _always(_shape: ModelShape) -> bool:
    return True


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    scaled = flag(config, "scale_attn_weights", True)
    return {"qkv_bias": True, "dense_bias": True, "mlp_bias": True, "attention_scale": None if scaled else 1.0}


def _fields(shape: ModelShape) -> dict[str, Any]:
    """Fields of TensorRT-LLM's GPTConfig; queries are divided by q_scaling · √head_size."""
    scale = shape.attention_scale
    return {
        "gpt_variant": "gpt2",
        "bias": True,
        "hidden_act": {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}[shape.hidden_act],
        "q_scaling": 1.0 if scale is None else 1 / (scale * shape.head_size**0.5),
        "apply_query_key_layer_scaling": False,
    }


def _rebuild(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    scaling = config["q_scaling"]
    biases = dict.fromkeys(("qkv_bias", "dense_bias", "mlp_bias"), config["bias"])
    return {**biases, "attention_scale": None if scaling == 1 else 1 / (scaling * shape.head_size**0.5)}


FAMILY = Family(
    name="gpt2",
    architectures=("GPT2LMHeadModel",),
    checked_against="oracle, transformers' logits",
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activations={"gelu_new": "gelu_tanh", **GELU},
    activation_key="activation_function",
    norm_key="layer_norm_epsilon",
    norm="layer",
    mlp="plain",
    position="learned",
    unrepresentable=("scale_attn_by_inverse_layer_idx", "add_cross_attention"),
    rope=no_rope,
    further=_further,
    trtllm_fields=_fields,
    rebuild=_rebuild,
    weights=(
        *embedding("transformer.wte.weight"),
        WeightRule(
            "transformer.position_embedding.weight",
            (Part("transformer.wpe.weight", ("positions", "hidden")),),
            "vocab",
            place="first",
        ),
        *norm(f"{LAYER}input_layernorm", f"{_HF}ln_1", bias=True),
        *fused_qkv(f"{_HF}attn.c_attn", transposed=True, bias=_always),
        *linear(
            f"{ATTENTION}dense", f"{_HF}attn.c_proj", "dense", "row", "hidden", "query", bias=_always, transposed=True
        ),
        *norm(f"{LAYER}post_layernorm", f"{_HF}ln_2", bias=True),
        *linear(f"{MLP}fc", f"{_HF}mlp.c_fc", "fc", "column", "intermediate", "hidden", bias=_always, transposed=True),
        *linear(
            f"{MLP}proj", f"{_HF}mlp.c_proj", "proj", "row", "hidden", "intermediate", bias=_always, transposed=True
        ),
        *norm("transformer.ln_f", "transformer.ln_f", place="last", bias=True),
        *head(tied="transformer.wte.weight"),
    ),
    ignored=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
    whole=("max_position_embeddings",),
)
