"""Where every element of a TensorRT-LLM checkpoint comes from: rank files as pieces of Hugging Face tensors.

The writer copies along this plan; the reader expects the tensors it names.
Rank number: rank = stage · tensor_parallel + tensor_rank. Layers count from 0 in each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from lpxbuild.families import ModelShape, check_parallel, family_named, stage_layers
from lpxbuild.families.weights import WeightRule, dimensions


@dataclass(frozen=True)
class Piece:
    """A block of a Hugging Face tensor that lies in a rank tensor from row `at` on.

    `rows` and `columns` are half-open ranges of the source as an (out, in) matrix; a vector counts as (n, 1).

    Attributes:
        transposed: the file holds the matrix as (in, out) (GPT-2's Conv1D).
        part: index into `Linear.parts` of the tensor's linear.
        part_row: row of the whole part that the piece begins with.
    """

    source: str
    rows: tuple[int, int]
    columns: tuple[int, int]
    at: int
    transposed: bool = False
    part: int = 0
    part_row: int = 0


@dataclass(frozen=True)
class LinearPart:
    """One matrix of a linear, whole: the query of a fused qkv, one expert's up projection.

    Attributes:
        role: "q", "k", "v", "dense", "fc", "gate", "up" or "proj". (Of a gated MLP, TensorRT-LLM's `fc` is HF's
            gate_proj and its `gate` is HF's up_proj; of a fused MLP the roles are "up" and "gate".)
        module: the HF module that holds it ("model.layers.0.self_attn.q_proj"); parts may share one (Phi-3).
        shape: (out, in).
        pieces: the matrix from its first row to its last, `at` counting inside the part.
        expert: number of the expert, None in dense layers.
    """

    role: str
    module: str
    shape: tuple[int, int]
    pieces: tuple[Piece, ...]
    expert: int | None = None


@dataclass(frozen=True)
class Linear:
    """A linear layer's weight before it is split: what scales are found over, and what a format may quantize.

    Attributes:
        module: TensorRT-LLM's module, its layer counted from the start of the stage ("transformer.layers.0.mlp.fc").
        layer: the layer, counted over the whole model.
        split: "qkv", "column" or "row".
        parts: in the order of the rows of a rank's tensor; of experts, all parts of the first one first.
    """

    module: str
    layer: int
    split: str
    parts: tuple[LinearPart, ...]


@dataclass(frozen=True)
class RankTensor:
    """One tensor of one rank file. Rows that no piece covers are zero (vocabulary padding).

    `name` counts layers from the start of the pipeline stage. Experts are stacked: shape (experts, out, in), with the
    rows of all experts one below the other in `pieces`.

    Attributes:
        dtype: safetensors' name where the tensor has a type of its own (routers are F32); None = the checkpoint's.
        plus_one: one is added in float32 before the cast (Gemma's norms).
        linear: set on the weight of a linear layer; the ranks of a stage share one object.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: str | None = None
    plus_one: bool = False
    linear: Linear | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def plan(shape: ModelShape, tensor: int, pipeline: int) -> Iterator[RankTensor]:
    """All tensors of all rank files; the ranks that share a source tensor follow each other.

    Args:
        shape: the model.
        tensor, pipeline: tensor-parallel and pipeline-parallel sizes.

    Raises:
        SourceError: the heads, the MLP or the layers cannot be split so.
    """
    check_parallel(shape, tensor, pipeline)
    rules = family_named(shape.family).rules(shape)
    for stage, layers in enumerate(stage_layers(shape.num_hidden_layers, pipeline)):
        if stage == 0:
            yield from _placed(rules, "first", shape, tensor, stage)
        for local, layer in enumerate(layers):
            for rule in rules:
                if rule.place == "layer":
                    yield from _over_ranks(rule, shape, tensor, stage, local=local, layer=layer)
        if stage == pipeline - 1:
            yield from _placed(rules, "last", shape, tensor, stage)


def _placed(
    rules: tuple[WeightRule, ...], place: str, shape: ModelShape, tensor: int, stage: int
) -> Iterator[RankTensor]:
    for rule in rules:
        if rule.place == place:
            yield from _over_ranks(rule, shape, tensor, stage, local=None, layer=None)


def _over_ranks(
    rule: WeightRule, shape: ModelShape, tensor: int, stage: int, *, local: int | None, layer: int | None
) -> Iterator[RankTensor]:
    sizes = dimensions(shape)
    sources = (rule.tied,) if rule.tied is not None and shape.tie_word_embeddings else rule.sources
    parts = [
        (source.format(layer=layer), tuple(sizes[dim] for dim in dims)) for source, dims in zip(sources, rule.dims)
    ]
    for rank in range(tensor):
        rank_shape, pieces = _SPLITS[rule.split](parts, shape, tensor, rank)
        yield RankTensor(stage * tensor + rank, rule.target.format(layer=local), rank_shape, pieces)


Part = tuple[str, tuple[int, ...]]
Cut = tuple[tuple[int, ...], tuple[Piece, ...]]


def _columns(dims: tuple[int, ...]) -> tuple[int, int]:
    return (0, dims[1]) if len(dims) == 2 else (0, 1)


def _replicated(parts: list[Part], _shape: ModelShape, _tensor: int, _rank: int) -> Cut:
    ((source, dims),) = parts
    return dims, (Piece(source, (0, dims[0]), _columns(dims), 0),)


def _column(parts: list[Part], _shape: ModelShape, tensor: int, rank: int) -> Cut:
    """Column-parallel: output features are the rows of the weight and of the bias."""
    ((source, dims),) = parts
    rows = dims[0] // tensor
    return (rows, *dims[1:]), (Piece(source, (rank * rows, (rank + 1) * rows), _columns(dims), 0),)


def _row(parts: list[Part], _shape: ModelShape, tensor: int, rank: int) -> Cut:
    """Row-parallel: input features are the columns of the weight."""
    ((source, dims),) = parts
    columns = dims[1] // tensor
    return (dims[0], columns), (Piece(source, (0, dims[0]), (rank * columns, (rank + 1) * columns), 0),)


def _vocab(parts: list[Part], _shape: ModelShape, tensor: int, rank: int) -> Cut:
    """Rows of a vocabulary that is zero-padded to a multiple of the ranks; a rank may hold padding only."""
    ((source, dims),) = parts
    rows = -(-dims[0] // tensor)
    begin, end = min(rank * rows, dims[0]), min((rank + 1) * rows, dims[0])
    pieces = (Piece(source, (begin, end), _columns(dims), 0),) if end > begin else ()
    return (rows, *dims[1:]), pieces


def _qkv(parts: list[Part], shape: ModelShape, tensor: int, rank: int) -> Cut:
    """[Q; K; V] of this rank's heads, each cut first and stacked then.

    With fewer KV heads than ranks, each KV head is copied to neighbouring ranks: heads 0 0 1 1 for 2 heads, 4 ranks.
    """
    query_heads = shape.num_attention_heads // tensor
    kv_heads = max(shape.num_key_value_heads // tensor, 1)
    first_kv = rank * shape.num_key_value_heads // tensor
    pieces = []
    at = 0
    for (source, dims), (first, heads) in zip(
        parts, ((rank * query_heads, query_heads), (first_kv, kv_heads), (first_kv, kv_heads))
    ):
        rows = (first * shape.head_size, (first + heads) * shape.head_size)
        pieces.append(Piece(source, rows, _columns(dims), at))
        at += rows[1] - rows[0]
    return (at, *parts[0][1][1:]), tuple(pieces)


_SPLITS: dict[str, Callable[[list[Part], ModelShape, int, int], Cut]] = {
    "replicated": _replicated,
    "column": _column,
    "row": _row,
    "vocab": _vocab,
    "qkv": _qkv,
}
