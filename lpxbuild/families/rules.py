"""Builders of the weight rules that families share, and the rules of Llama's layout.

TensorRT-LLM stores HF's gate_proj (the activated branch) as mlp.fc and up_proj as mlp.gate; where it has one fused
tensor instead, that is mlp.fc = [up; gate].
"""

from __future__ import annotations

from lpxbuild.families.weights import Part, Place, Split, WeightRule, When

LAYER = "transformer.layers.{layer}."
ATTENTION = f"{LAYER}attention."
MLP = f"{LAYER}mlp."
HF = "model.layers.{layer}."
Rules = tuple[WeightRule, ...]


def embedding(source: str = "model.embed_tokens.weight") -> Rules:
    """The table of the vocabulary, on the first stage."""
    return (
        WeightRule("transformer.vocab_embedding.weight", (Part(source, ("vocab", "hidden")),), "vocab", place="first"),
    )


def head(source: str = "lm_head.weight", tied: str = "model.embed_tokens.weight") -> Rules:
    """The output projection, on the last stage; a tied one is written as a copy of the embedding."""
    return (WeightRule("lm_head.weight", (Part(source, ("vocab", "hidden")),), "vocab", place="last", tied=tied),)


def norm(
    target: str,
    source: str,
    *,
    dim: str = "hidden",
    place: Place = "layer",
    bias: bool = False,
    plus_one: bool = False,
    when: When = None,
) -> Rules:
    """A norm by the names of its modules: the weight, and with `bias` the bias of a LayerNorm."""
    weight = WeightRule(
        f"{target}.weight", (Part(f"{source}.weight", (dim,)),), "replicated", place, when, plus_one=plus_one
    )
    if not bias:
        return (weight,)
    return (weight, WeightRule(f"{target}.bias", (Part(f"{source}.bias", (dim,)),), "replicated", place, when))


def linear(
    target: str,
    source: str,
    role: str,
    split: Split,
    out: str,
    into: str,
    *,
    bias: When = None,
    transposed: bool = False,
) -> Rules:
    """A linear layer by the names of its modules; `bias` says which models have one.

    The bias follows the rows of the weight, so a row-parallel layer keeps it whole.
    """
    weight = WeightRule(
        f"{target}.weight", (Part(f"{source}.weight", (out, into), role),), split, transposed=transposed
    )
    if bias is None:
        return (weight,)
    follows: Split = "replicated" if split == "row" else split
    return (
        weight,
        WeightRule(f"{target}.bias", (Part(f"{source}.bias", (out,), role),), follows, when=bias),
    )


def separate_qkv(source: str = f"{HF}self_attn.", *, bias: When = None) -> Rules:
    """attention.qkv of three HF modules q_proj, k_proj and v_proj."""

    def parts(suffix: str, *into: str) -> tuple[Part, ...]:
        return tuple(
            Part(f"{source}{role}_proj.{suffix}", (out, *into), role)
            for role, out in (("q", "query"), ("k", "key_value"), ("v", "key_value"))
        )

    weight = WeightRule(f"{ATTENTION}qkv.weight", parts("weight", "hidden"), "qkv")
    if bias is None:
        return (weight,)
    return (weight, WeightRule(f"{ATTENTION}qkv.bias", parts("bias"), "qkv", when=bias))


def fused_qkv(source: str, *, grouped: bool = False, transposed: bool = False, bias: When = None) -> Rules:
    """attention.qkv of one HF module: [Q; K; V], or one KV head after the other with its queries (`grouped`)."""

    def parts(suffix: str, *into: str) -> tuple[Part, ...]:
        above: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("q", "query", ()),
            ("k", "key_value", ("query",)),
            ("v", "key_value", ("query", "key_value")),
        )
        return tuple(
            Part(f"{source}.{suffix}", (out, *into), role, after=() if grouped else after, grouped=grouped)
            for role, out, after in above
        )

    weight = WeightRule(f"{ATTENTION}qkv.weight", parts("weight", "hidden"), "qkv", transposed=transposed)
    if bias is None:
        return (weight,)
    return (weight, WeightRule(f"{ATTENTION}qkv.bias", parts("bias"), "qkv", when=bias))


def gated_mlp(source: str = f"{HF}mlp.", *, bias: When = None) -> Rules:
    """mlp.fc, mlp.gate and mlp.proj of HF's gate_proj, up_proj and down_proj."""
    return (
        *linear(f"{MLP}fc", f"{source}gate_proj", "fc", "column", "intermediate", "hidden", bias=bias),
        *linear(f"{MLP}gate", f"{source}up_proj", "gate", "column", "intermediate", "hidden", bias=bias),
        *linear(f"{MLP}proj", f"{source}down_proj", "proj", "row", "hidden", "intermediate", bias=bias),
    )


def head_norms(*, plus_one: bool = False) -> Rules:
    """Norms on every query and key head."""
    return (
        *norm(f"{ATTENTION}q_layernorm", f"{HF}self_attn.q_norm", dim="head", plus_one=plus_one, when="qk_norm"),
        *norm(f"{ATTENTION}k_layernorm", f"{HF}self_attn.k_norm", dim="head", plus_one=plus_one, when="qk_norm"),
    )


DECODER: Rules = (
    *embedding(),
    *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm"),
    *separate_qkv(bias="qkv_bias"),
    *head_norms(),
    *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query", bias="dense_bias"),
    *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm"),
    *gated_mlp(bias="mlp_bias"),
    *norm("transformer.ln_f", "model.norm", place="last"),
    *head(),
)
