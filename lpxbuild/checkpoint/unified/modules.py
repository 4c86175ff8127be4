"""A model as the unified layout sees it: Hugging Face modules, and which of them read the same input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lpxbuild.checkpoint.layout import Linear, Piece, RankTensor, plan
from lpxbuild.families import ModelShape

HEAD = "lm_head"


@dataclass(frozen=True)
class Module:
    """A linear layer of the Hugging Face model, whole.

    Attributes:
        name: "model.layers.0.self_attn.q_proj".
        piece: all of its weight as an (out, in) matrix.
        roles: what TensorRT-LLM makes of it; three of a fused qkv_proj.
        expert: number of the expert, None in dense layers.
    """

    name: str
    piece: Piece
    roles: tuple[str, ...]
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.piece.rows[1], self.piece.columns[1]

    @property
    def transposed(self) -> bool:
        """The files hold it as (in, out): GPT-2's Conv1D."""
        return self.piece.transposed


@dataclass(frozen=True)
class Norm:
    """The norm in front of a group: its tensors (weight, and bias where it has one), and whether it adds one."""

    tensors: tuple[str, ...]
    plus_one: bool = False


@dataclass(frozen=True)
class Group:
    """Modules of one input: loaders stack them into one matrix, so they share the scale of the input.

    Attributes:
        layer: counted over the whole model.
        norm: whose output they and nothing else read; None where something lies between, or another reader is there.
        experts: the same for the groups of all experts of a layer ("transformer.layers.0.mlp.fc"); None = no expert.
    """

    layer: int
    modules: tuple[Module, ...]
    norm: Norm | None = None
    experts: str | None = None


@dataclass(frozen=True)
class Modules:
    """Everything a unified checkpoint holds.

    Attributes:
        groups: all linear layers, in the order of the layers.
        attention: for each layer, the module of its attention ("model.layers.0.self_attn").
        plain: modules with a matrix that no format touches: embeddings, head, routers.
        tensors: HF names of all tensors in the order of the model, without a tied head.
    """

    groups: tuple[Group, ...]
    attention: tuple[str, ...]
    plain: tuple[str, ...]
    tensors: tuple[str, ...]

    @property
    def linears(self) -> Iterator[Module]:
        """All linear layers."""
        return (module for group in self.groups for module in group.modules)

    def siblings(self) -> dict[str, tuple[str, ...]]:
        """Module of an expert → the modules that are the same part of all experts of its layer, itself included."""
        parts: dict[tuple[str, int], list[str]] = {}
        for group in self.groups:
            if group.experts is not None:
                for number, module in enumerate(group.modules):
                    parts.setdefault((group.experts, number), []).append(module.name)
        return {name: tuple(names) for names in parts.values() for name in names}


def model_modules(shape: ModelShape) -> Modules:
    """The modules of a model, taken from the weight rules of its family."""
    tensors = list(plan(shape, 1, 1, layout="unified_hf"))
    by_target = {tensor.name: tensor for tensor in tensors}
    names = dict.fromkeys(piece.source for tensor in tensors for piece in tensor.pieces)
    groups: list[Group] = []
    attention: dict[int, str] = {}
    linear_names: set[str] = set()
    open_groups: dict[tuple[str, int | None], list[Module]] = {}
    layer_of: dict[tuple[str, int | None], int] = {}
    for tensor in tensors:
        if tensor.linear is None:
            continue
        for module in _modules(tensor.linear):
            linear_names.add(module.piece.source)
            key = (_input_of(tensor.linear), module.expert)
            open_groups.setdefault(key, []).append(module)
            layer_of[key] = tensor.linear.layer
            if tensor.linear.split == "qkv":
                attention.setdefault(tensor.linear.layer, module.name.rpartition(".")[0])
    for key, modules in open_groups.items():
        layer = layer_of[key]
        experts = key[0] if key[1] is not None else None
        norm = _norm(by_target, key[0], layer) if key[1] is None and len(modules) > 1 else None
        groups.append(Group(layer, tuple(modules), norm, experts))
    plain = [
        name.removesuffix(".weight")
        for tensor in tensors
        if tensor.linear is None and len(tensor.shape) == 2
        for name in dict.fromkeys(piece.source for piece in tensor.pieces)
        if name not in linear_names
    ]
    head = by_target["lm_head.weight"].pieces[0].source.removesuffix(".weight")
    if head in plain and plain.count(head) > 1:  # tied: the rule names the embedding
        plain.append(HEAD)
    return Modules(
        tuple(groups),
        tuple(attention[layer] for layer in sorted(attention)),
        tuple(sorted(set(plain))),
        tuple(names),
    )


def _modules(linear: Linear) -> Iterator[Module]:
    """The HF modules that make a TensorRT-LLM linear; parts of one HF tensor are one module."""
    parts: dict[str, list[tuple[str, int | None, Sequence[Piece]]]] = {}
    rows: dict[str, int] = {}
    for part in linear.parts:
        source = part.pieces[0].source
        parts.setdefault(source, []).append((part.role, part.expert, part.pieces))
        rows[source] = rows.get(source, 0) + part.shape[0]
    columns = linear.parts[0].shape[1]
    for source, found in parts.items():
        piece = Piece(source, (0, rows[source]), (0, columns), 0, found[0][2][0].transposed)
        yield Module(source.removesuffix(".weight"), piece, tuple(role for role, _, _ in found), found[0][1])


def _input_of(linear: Linear) -> str:
    """A name for what a linear reads: mlp.fc and mlp.gate read the same, everything else has an input of its own."""
    parent, _, name = linear.module.rpartition(".")
    return f"{parent}.fc" if name == "gate" else linear.module


def _norm(by_target: dict[str, RankTensor], module: str, layer: int) -> Norm | None:
    """The norm in front of attention.qkv or of the dense MLP; a shared expert reads beside a router."""
    prefix = f"transformer.layers.{layer}."
    if module == f"{prefix}attention.qkv":
        candidates = ["input_layernorm"]
    elif module == f"{prefix}mlp.fc":
        candidates = ["pre_feedforward_layernorm", "post_layernorm"]
    else:
        return None
    for candidate in candidates:
        weight = by_target.get(f"{prefix}{candidate}.weight")
        if weight is not None:
            bias = by_target.get(f"{prefix}{candidate}.bias")
            tensors = tuple(tensor.pieces[0].source for tensor in (weight, bias) if tensor is not None)
            return Norm(tensors, weight.plus_one)
    return None
