"""InternLM2 (transformers' remote code): Llama under other names, with q, k and v of each KV head in one tensor.

Its configs scale RoPE "dynamic": beyond max_position_embeddings the base grows with the length, up to it RoPE is plain.
TensorRT-LLM gets plain RoPE; a longer sequence is the attention feature long_rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family, Rope
from lpxbuild.families.llama import biases_of_llama, llama_fields
from lpxbuild.families.reading import positive_float
from lpxbuild.families.rope import kind_of, read_rope, spelled
from lpxbuild.families.rules import ATTENTION, LAYER, MLP, embedding, fused_qkv, head, linear, norm

_HF = "model.layers.{layer}."
_MLP = f"{_HF}feed_forward."


def _rope(config: Mapping[str, Any], default_theta: float, positions: int) -> Rope:
    base, scaling, _ = spelled(config, default_theta)
    if kind_of(scaling, ("default", "linear", "dynamic")) == "dynamic":
        factor = positive_float(scaling, "factor", where="rope_scaling.")
        return base, {"rope_type": "dynamic", "factor": factor, "original_max_position_embeddings": positions}
    return read_rope(config, default_theta, positions)


FAMILY = Family(
    name="internlm2",
    architectures=("InternLM2ForCausalLM",),
    attention=("long_rope",),
    remote_code=True,
    checked_against="transformers' logits of the Llama with the same weights",
    defaults={"max_position_embeddings": 2048, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "bias": True},
    qkv_bias="bias",
    dense_bias="bias",
    rope=_rope,
    trtllm_fields=llama_fields,
    rebuild=biases_of_llama,
    weights=(
        *embedding("model.tok_embeddings.weight"),
        *norm(f"{LAYER}input_layernorm", f"{_HF}attention_norm"),
        *fused_qkv(f"{_HF}attention.wqkv", grouped=True, bias="qkv_bias"),
        *linear(f"{ATTENTION}dense", f"{_HF}attention.wo", "dense", "row", "hidden", "query", bias="dense_bias"),
        *norm(f"{LAYER}post_layernorm", f"{_HF}ffn_norm"),
        *linear(f"{MLP}fc", f"{_MLP}w1", "fc", "column", "intermediate", "hidden"),
        *linear(f"{MLP}gate", f"{_MLP}w3", "gate", "column", "intermediate", "hidden"),
        *linear(f"{MLP}proj", f"{_MLP}w2", "proj", "row", "hidden", "intermediate"),
        *norm("transformer.ln_f", "model.norm", place="last"),
        *head("output.weight", tied="model.tok_embeddings.weight"),
    ),
    ignored=(".attention.rope.inv_freq",),
)
