"""Where every element of a TensorRT-LLM checkpoint comes from: rank files as pieces of Hugging Face tensors.

The writer copies along this plan; the reader expects the tensors it names.
Rank number: rank = stage · tensor_parallel + tensor_rank. Layers count from 0 in each stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from lpxbuild.families import ModelShape, check_parallel, family_named, stage_layers
from lpxbuild.families.weights import Part, WeightRule, dimensions, expert_numbers


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


def plan(shape: ModelShape, tensor: int, pipeline: int, *, layout: str = "tensorrt_llm") -> Iterator[RankTensor]:
    """All tensors of all rank files; the ranks that share a source tensor follow each other.

    Args:
        shape: the model.
        tensor, pipeline: tensor-parallel and pipeline-parallel sizes.
        layout: "unified_hf" where only the linears of the plan are looked at, for a checkpoint of that layout: models
            that TensorRT-LLM cannot compute are no matter then.

    Raises:
        SourceError: the heads, the MLP or the layers cannot be split so, or the layout has no field for the model.
    """
    check_parallel(shape, tensor, pipeline, layout=layout)
    rules = family_named(shape.family).rules(shape)
    for stage, layers in enumerate(stage_layers(shape.num_hidden_layers, pipeline)):
        if stage == 0:
            yield from _placed(rules, "first", shape, tensor, stage)
        for local, layer in enumerate(layers):
            for rule in rules:
                if rule.place == "layer" and rule.in_layer(shape, layer):
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
    name = rule.target.format(layer=local)
    first = [_Whole.of(part, rule, shape, layer=layer) for part in rule.parts]
    parts = [whole.of_expert(expert, layer) for expert in expert_numbers(rule, shape) for whole in first]
    linear = None
    if rule.linear and layer is not None:
        linear = Linear(name.removesuffix(".weight"), layer, rule.split, tuple(part.linear_part() for part in parts))
    for rank in range(tensor):
        pieces: list[Piece] = []
        at = 0
        for number, part in enumerate(parts):
            rows, columns = part.share(rule, shape, tensor, rank)
            pieces += part.cut(rows, columns, at=at, number=number)
            at += _padded(part.rows, tensor) if rule.split == "vocab" else rows[1] - rows[0]
        width = (columns[1] - columns[0],) if part.matrix else ()
        count = shape.moe.num_experts if rule.experts and shape.moe else None
        size = (at, *width) if count is None else (count, at // count, *width)
        yield RankTensor(
            stage * tensor + rank, name, size, tuple(pieces), rule.dtype, plus_one=rule.plus_one, linear=linear
        )


Range = tuple[int, int]


def _padded(rows: int, tensor: int) -> int:
    return -(-rows // tensor)


@dataclass(frozen=True)
class _Whole:
    """A part of a rule with its numbers: where it lies in one HF tensor, and how large it is."""

    part: Part
    source: str
    segments: tuple[tuple[int, int, int], ...]
    rows: int
    columns: int
    matrix: bool
    transposed: bool
    expert: int | None

    @classmethod
    def of(cls, part: Part, rule: WeightRule, shape: ModelShape, *, layer: int | None) -> _Whole:
        """The part of a rule without experts, or what all experts have in common."""
        sizes = dimensions(shape)
        tied = rule.tied is not None and shape.tie_word_embeddings
        source = (rule.tied if tied and rule.tied else part.source).format(layer=layer, expert=None)
        matrix = len(part.dims) == 2
        return cls(
            part,
            source,
            part.segments(shape),
            sizes[part.dims[0]],
            sizes[part.dims[1]] if matrix else 1,
            matrix,
            rule.transposed and matrix,
            None,
        )

    def of_expert(self, expert: int | None, layer: int | None) -> _Whole:
        """The same part of one expert."""
        if expert is None:
            return self
        source = self.part.source.format(layer=layer, expert=expert)
        return _Whole(self.part, source, self.segments, self.rows, self.columns, self.matrix, self.transposed, expert)

    def share(self, rule: WeightRule, shape: ModelShape, tensor: int, rank: int) -> tuple[Range, Range]:
        """Rows and columns of the part that a rank holds.

        With fewer KV heads than ranks, each is copied to neighbouring ranks: heads 0 0 1 1 for 2 heads, 4 ranks.
        A rank may hold no row of a vocabulary but padding.
        """
        rows, columns = (0, self.rows), (0, self.columns)
        if rule.split == "row":
            count = self.columns // tensor
            return rows, (rank * count, (rank + 1) * count)
        if rule.split == "column":
            count = self.rows // tensor
            return (rank * count, (rank + 1) * count), columns
        if rule.split == "vocab":
            count = _padded(self.rows, tensor)
            return (min(rank * count, self.rows), min((rank + 1) * count, self.rows)), columns
        if rule.split == "qkv":
            if self.part.role == "q":
                heads = shape.num_attention_heads // tensor
                first = rank * heads
            else:
                heads = max(shape.num_key_value_heads // tensor, 1)
                first = rank * shape.num_key_value_heads // tensor
            return (first * shape.head_size, (first + heads) * shape.head_size), columns
        return rows, columns

    def cut(self, rows: Range, columns: Range, *, at: int, number: int = 0) -> list[Piece]:
        """The pieces of a block of the part that lies in its target from row `at` on."""
        pieces = []
        for part_row, source_row, count in self.segments:
            begin, end = max(rows[0], part_row), min(rows[1], part_row + count)
            if begin < end:
                shift = source_row - part_row
                place = (begin + shift, end + shift)
                pieces.append(Piece(self.source, place, columns, at + begin - rows[0], self.transposed, number, begin))
        return pieces

    def linear_part(self) -> LinearPart:
        module = self.source.removesuffix(".weight")
        pieces = tuple(self.cut((0, self.rows), (0, self.columns), at=0))
        return LinearPart(self.part.role, module, (self.rows, self.columns), pieces, self.expert)
