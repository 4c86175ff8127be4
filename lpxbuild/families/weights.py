"""Rules from Hugging Face tensors to TensorRT-LLM tensors, as data.

A rule says which parts of which HF tensors make a TensorRT-LLM tensor and how it is split over tensor-parallel ranks;
the converter, the reader of checkpoints and the check of a source all work from it. A family is a tuple of rules, most
of them made by the builders of `lpxbuild.families.rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lpxbuild.families.shape import ModelShape

Split = Literal["vocab", "column", "row", "qkv", "replicated"]
"""How a tensor meets the tensor-parallel ranks.

vocab: rows, zero-padded to a multiple of the ranks · column: rows of each part, then stacked · row: columns ·
qkv: rows of each part by heads, then stacked; KV heads are repeated where there are more ranks ·
replicated: the same on every rank (norms, and biases of row-parallel layers, which are added once after the sum).
"""
Place = Literal["first", "layer", "last"]
When = str | Callable[[ModelShape], bool] | None
"""For which models: a flag of ModelShape by its name, a question, or all of them."""


@dataclass(frozen=True)
class Part:
    """A matrix or a vector, and where it lies in the Hugging Face files.

    Attributes:
        source: the HF tensor; `{layer}` and `{expert}` stand for their numbers.
        dims: names that `dimensions` resolves: the part's own size, (out, in) or (out,).
        role: "q", "k", "v", "dense", "fc", "gate", "up", "proj"; empty for what is no linear.
        after: the HF tensor holds several parts one below the other; sizes of those above this one.
        grouped: the HF tensor holds, for one KV head after the other, its query heads, its key and its value.
    """

    source: str
    dims: tuple[str, ...]
    role: str = ""
    after: tuple[str, ...] = ()
    grouped: bool = False

    def segments(self, shape: ModelShape) -> tuple[tuple[int, int, int], ...]:
        """The part's rows in the HF tensor as an (out, in) matrix: (row of the part, row of the tensor, count)."""
        sizes = dimensions(shape)
        if not self.grouped:
            return ((0, sum(sizes[name] for name in self.after), sizes[self.dims[0]]),)
        size, queries = shape.head_size, shape.num_attention_heads // shape.num_key_value_heads
        first, heads = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[self.role]
        return tuple(
            (group * heads * size, (group * (queries + 2) + first) * size, heads * size)
            for group in range(shape.num_key_value_heads)
        )


@dataclass(frozen=True)
class WeightRule:
    """One TensorRT-LLM tensor.

    Attributes:
        target: its name; `{layer}` counts from 0 in each pipeline stage.
        parts: in the order of the rows of a rank's tensor.
        when: the models that have it.
        layers: the layers that have it (None = all), of rules whose place is "layer".
        tied: the HF tensor to use instead where embeddings are tied.
        transposed: the files hold matrices as (in, out).
        plus_one: one is added in float32 before the cast.
        dtype: safetensors' name of the type, where it is not the checkpoint's.
        experts: one tensor (experts, out, in) of all experts; each part's source has `{expert}`.
    """

    target: str
    parts: tuple[Part, ...]
    split: Split
    place: Place = "layer"
    when: When = None
    layers: Callable[[ModelShape, int], bool] | None = None
    tied: str | None = None
    transposed: bool = False
    plus_one: bool = False
    dtype: str | None = None
    experts: bool = False

    @property
    def linear(self) -> bool:
        """Whether this is the weight of a linear layer that a quantization format may change."""
        return self.split in ("qkv", "column", "row") and len(self.parts[0].dims) == 2

    def holds(self, shape: ModelShape) -> bool:
        """Whether the model has this tensor."""
        if self.when is None:
            return True
        return bool(getattr(shape, self.when) if isinstance(self.when, str) else self.when(shape))

    def in_layer(self, shape: ModelShape, layer: int) -> bool:
        """Whether that layer of a model that has the tensor has it."""
        return self.layers is None or self.layers(shape, layer)

    def sources(self, shape: ModelShape, layer: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
        """HF tensors of one layer with the shapes that the files must have."""
        sizes = dimensions(shape)
        rows: dict[str, int] = {}
        columns: dict[str, tuple[int, ...]] = {}
        for part in self.parts:
            rows[part.source] = rows.get(part.source, 0) + sizes[part.dims[0]]
            columns[part.source] = tuple(sizes[name] for name in part.dims[1:])
        for expert in expert_numbers(self, shape):
            for source, count in rows.items():
                found = (count, *columns[source])
                yield source.format(layer=layer, expert=expert), found[::-1] if self.transposed else found


def expert_numbers(rule: WeightRule, shape: ModelShape) -> range | tuple[None]:
    """Numbers of the experts that a rule goes over; one None for what has no experts."""
    return range(shape.moe.num_experts) if rule.experts and shape.moe is not None else (None,)


def dimensions(shape: ModelShape) -> dict[str, int]:
    """Sizes by the names used in `Part.dims`."""
    moe = shape.moe
    return {
        "vocab": shape.vocab_size,
        "positions": shape.max_position_embeddings,
        "hidden": shape.hidden_size,
        "intermediate": shape.intermediate_size,
        "query": shape.num_attention_heads * shape.head_size,
        "key_value": shape.num_key_value_heads * shape.head_size,
        "head": shape.head_size,
        "one": 1,
        "experts": moe.num_experts if moe else 0,
        "expert_intermediate": moe.intermediate_size if moe else 0,
        "shared_intermediate": moe.shared_intermediate_size if moe else 0,
    }
