"""Architectures that are read from GGUF, one entry each: which Hugging Face model they are and how tensors are named.

Names and layouts are those that llama.cpp's converter writes (convert_hf_to_gguf.py, gguf-py/gguf/tensor_mapping.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError
from lpxbuild.source.gguf.rope import longrope_scaling, read_scaling

if TYPE_CHECKING:
    from lpxbuild.source.gguf.metadata import Metadata
    from lpxbuild.source.gguf.weights import WeightPlan

ROPE_FREQUENCIES, ROPE_SHORT, ROPE_LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


@dataclass(frozen=True)
class Architecture:
    """How a GGUF model becomes a Hugging Face folder.

    Attributes:
        name: `general.architecture`.
        model_type, hf_architecture: what the folder's config says.
        layer: name of a tensor in a layer → the module in Hugging Face's layer.
        experts: name of a tensor of stacked experts (experts, out, in) → the module of one, with `{expert}`.
        biases: tensors in a layer that have a bias in every model.
        all_or_no_biases: groups of tensors of which a model has all biases or none, by the config key that says it.
        beside: tensors that hold RoPE factors and become part of the config.
        interleaved: llama.cpp interleaves the halves of each query and key head that RoPE turns together.
        norms_plus_one: norms are stored with the one that Hugging Face's model adds.
        own_keys: keys that this architecture has a meaning for and the others refuse.
        config: what config.json says beside the sizes that all architectures have.
    """

    name: str
    model_type: str
    hf_architecture: str
    config: Callable[[Metadata, WeightPlan], dict[str, Any]]
    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    all_or_no_biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    interleaved: bool = False
    norms_plus_one: bool = False
    own_keys: tuple[str, ...] = ()


def architecture_of(metadata: Metadata) -> Architecture:
    """The entry of a file's architecture; `llama` with experts is Mixtral.

    Raises:
        SourceError: names the architecture found and those that are read.
    """
    found = next((entry for entry in ARCHITECTURES if entry.name == metadata.architecture), None)
    if found is None:
        known = ", ".join(dict.fromkeys(entry.name for entry in ARCHITECTURES))
        raise SourceError(
            f"{metadata.file.name} has the architecture {metadata.architecture}, only {known} are read from GGUF",
            why="the weights of other architectures are laid out by other rules",
            next="give the Hugging Face folder or hub id of this model",
        )
    return MIXTRAL if found is LLAMA and metadata.whole(metadata.key("expert_count"), 0) > 0 else found


def _llama(metadata: Metadata, plan: WeightPlan) -> dict[str, Any]:
    return {
        "head_dim": metadata.head_size(),
        "hidden_act": "silu",
        "rope_scaling": read_scaling(metadata, plan.beside.get(ROPE_FREQUENCIES)),
        "attention_bias": plan.biases["attention_bias"],
        "mlp_bias": plan.biases["mlp_bias"],
    }


def _mixtral(metadata: Metadata, plan: WeightPlan) -> dict[str, Any]:
    return {
        "head_dim": metadata.head_size(),
        "hidden_act": "silu",
        "rope_scaling": read_scaling(metadata, plan.beside.get(ROPE_FREQUENCIES)),
        "num_local_experts": metadata.size(metadata.key("expert_count")),
        "num_experts_per_tok": metadata.size(metadata.key("expert_used_count")),
        "sliding_window": None,
    }


def _qwen2(metadata: Metadata, _plan: WeightPlan) -> dict[str, Any]:
    hidden, heads = metadata.size(metadata.key("embedding_length")), metadata.size(metadata.key("attention.head_count"))
    size = metadata.head_size()
    return {
        **({} if size * heads == hidden else {"head_dim": size}),
        "hidden_act": "silu",
        "rope_scaling": read_scaling(metadata),
        "use_sliding_window": False,
    }


def _qwen3(metadata: Metadata, _plan: WeightPlan) -> dict[str, Any]:
    return {
        "head_dim": metadata.head_size(),
        "hidden_act": "silu",
        "rope_scaling": read_scaling(metadata),
        "use_sliding_window": False,
        "attention_bias": False,
    }


def _gemma(metadata: Metadata, _plan: WeightPlan) -> dict[str, Any]:
    if read_scaling(metadata) is not None:
        raise metadata.refused("scales RoPE", "a Gemma model has no rope scaling")
    return {
        "head_dim": metadata.head_size(),
        # Both spellings: transformers reads hidden_activation, older readers hidden_act.
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def _phi3(metadata: Metadata, plan: WeightPlan) -> dict[str, Any]:
    window = metadata.key("attention.sliding_window")
    if metadata.value(window) is None:
        raise metadata.refused(
            f"has no {window}", "Phi-3 models have a window, Phi-4 models have none, and older files do not say which"
        )
    length = metadata.size(metadata.key("context_length"))
    head = metadata.head_size(whole_rotary=False)
    rotary = metadata.size(metadata.key("rope.dimension_count"), head)
    return {
        "hidden_act": "silu",
        "sliding_window": metadata.whole(window) or None,
        "partial_rotary_factor": rotary / head,
        "original_max_position_embeddings": metadata.size(metadata.key("rope.scaling.original_context_length"), length),
        "rope_scaling": longrope_scaling(
            metadata, plan.beside.get(ROPE_SHORT), plan.beside.get(ROPE_LONG), dimensions=rotary, length=length
        ),
    }


LLAMA = Architecture(
    name="llama",
    model_type="llama",
    hf_architecture="LlamaForCausalLM",
    config=_llama,
    layer={**ATTENTION, **MLP},
    all_or_no_biases={
        "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
    },
    beside=(ROPE_FREQUENCIES,),
    interleaved=True,
)
MIXTRAL = Architecture(
    name="llama",
    model_type="mixtral",
    hf_architecture="MixtralForCausalLM",
    config=_mixtral,
    layer={**ATTENTION, "ffn_gate_inp": "block_sparse_moe.gate"},
    experts={
        "ffn_gate": "block_sparse_moe.experts.{expert}.w1",
        "ffn_down": "block_sparse_moe.experts.{expert}.w2",
        "ffn_up": "block_sparse_moe.experts.{expert}.w3",
    },
    beside=(ROPE_FREQUENCIES,),
    interleaved=True,
    own_keys=("expert_count", "expert_used_count"),
)
QWEN2 = Architecture(
    name="qwen2",
    model_type="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    config=_qwen2,
    layer={**ATTENTION, **MLP},
    biases=("attn_q", "attn_k", "attn_v"),
)
QWEN3 = Architecture(
    name="qwen3",
    model_type="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    config=_qwen3,
    layer={**ATTENTION, **MLP, "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
)
GEMMA = Architecture(
    name="gemma",
    model_type="gemma",
    hf_architecture="GemmaForCausalLM",
    config=_gemma,
    layer={**ATTENTION, **MLP},
    norms_plus_one=True,
)
PHI3 = Architecture(
    name="phi3",
    model_type="phi3",
    hf_architecture="Phi3ForCausalLM",
    config=_phi3,
    layer={
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    beside=(ROPE_SHORT, ROPE_LONG),
    own_keys=("attention.sliding_window", "rope.scaling.attn_factor"),
)
ARCHITECTURES = (LLAMA, MIXTRAL, QWEN2, QWEN3, GEMMA, PHI3)
