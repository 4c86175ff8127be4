"""Rules from Hugging Face tensors to TensorRT-LLM tensors, as data.

Linear weights are (out, in) in both layouts. A rule says which HF tensors make a TensorRT-LLM tensor and how it is
split over tensor-parallel ranks; the converter and the reader of checkpoints both work from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lpxbuild.families.shape import ModelShape

Split = Literal["vocab", "column", "row", "qkv", "replicated"]
"""How a tensor meets the tensor-parallel ranks.

vocab: rows, zero-padded to a multiple of the ranks · column: rows · row: columns ·
qkv: rows of each part by heads, then stacked; KV heads are repeated where there are more ranks ·
replicated: the same on every rank (norms, and biases of row-parallel layers, which are added once after the sum).
"""
Place = Literal["first", "layer", "last"]


@dataclass(frozen=True)
class WeightRule:
    """One TensorRT-LLM tensor.

    `{layer}` in `target` and `source` is the layer; targets count from 0 in each pipeline stage.
    `dims` are names that `dimensions` resolves, one tuple for each source.
    `when`: the flag of ModelShape that must be true. `tied`: the HF tensor to use where embeddings are tied.
    """

    target: str
    sources: tuple[str, ...]
    dims: tuple[tuple[str, ...], ...]
    split: Split
    place: Place = "layer"
    when: str | None = None
    tied: str | None = None


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Sizes by the names used in `WeightRule.dims`."""
    return {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "intermediate": shape.intermediate_size,
        "query": shape.num_attention_heads * shape.head_size,
        "key_value": shape.num_key_value_heads * shape.head_size,
        "head": shape.head_size,
    }


_ATTENTION = "transformer.layers.{layer}.attention."
_MLP = "transformer.layers.{layer}.mlp."
_HF = "model.layers.{layer}."
_QKV = tuple(f"{_HF}self_attn.{part}_proj" for part in "qkv")


def _linear(
    module: str, source: str, split: Split, out_dim: str, in_dim: str, *, bias_when: str
) -> tuple[WeightRule, WeightRule]:
    """A linear layer and its bias; the bias follows the rows, so a row-parallel layer keeps it whole."""
    return (
        WeightRule(f"{module}.weight", (f"{source}.weight",), ((out_dim, in_dim),), split),
        WeightRule(
            f"{module}.bias",
            (f"{source}.bias",),
            ((out_dim,),),
            "replicated" if split == "row" else split,
            when=bias_when,
        ),
    )


# TensorRT-LLM stores HF's gate_proj (the activated branch) as mlp.fc, and up_proj as mlp.gate.
DECODER: tuple[WeightRule, ...] = (
    WeightRule(
        "transformer.vocab_embedding.weight",
        ("model.embed_tokens.weight",),
        (("vocab", "hidden"),),
        "vocab",
        place="first",
    ),
    WeightRule(
        "transformer.layers.{layer}.input_layernorm.weight",
        (f"{_HF}input_layernorm.weight",),
        (("hidden",),),
        "replicated",
    ),
    WeightRule(
        f"{_ATTENTION}qkv.weight",
        tuple(f"{part}.weight" for part in _QKV),
        (("query", "hidden"), ("key_value", "hidden"), ("key_value", "hidden")),
        "qkv",
    ),
    WeightRule(
        f"{_ATTENTION}qkv.bias",
        tuple(f"{part}.bias" for part in _QKV),
        (("query",), ("key_value",), ("key_value",)),
        "qkv",
        when="qkv_bias",
    ),
    WeightRule(
        f"{_ATTENTION}q_layernorm.weight",
        (f"{_HF}self_attn.q_norm.weight",),
        (("head",),),
        "replicated",
        when="qk_norm",
    ),
    WeightRule(
        f"{_ATTENTION}k_layernorm.weight",
        (f"{_HF}self_attn.k_norm.weight",),
        (("head",),),
        "replicated",
        when="qk_norm",
    ),
    *_linear(f"{_ATTENTION}dense", f"{_HF}self_attn.o_proj", "row", "hidden", "query", bias_when="dense_bias"),
    WeightRule(
        "transformer.layers.{layer}.post_layernorm.weight",
        (f"{_HF}post_attention_layernorm.weight",),
        (("hidden",),),
        "replicated",
    ),
    *_linear(f"{_MLP}fc", f"{_HF}mlp.gate_proj", "column", "intermediate", "hidden", bias_when="mlp_bias"),
    *_linear(f"{_MLP}gate", f"{_HF}mlp.up_proj", "column", "intermediate", "hidden", bias_when="mlp_bias"),
    *_linear(f"{_MLP}proj", f"{_HF}mlp.down_proj", "row", "hidden", "intermediate", bias_when="mlp_bias"),
    WeightRule("transformer.ln_f.weight", ("model.norm.weight",), (("hidden",),), "replicated", place="last"),
    WeightRule(
        "lm_head.weight",
        ("lm_head.weight",),
        (("vocab", "hidden"),),
        "vocab",
        place="last",
        tied="model.embed_tokens.weight",
    ),
)
