"""The whole matrices of a TensorRT-LLM checkpoint, joined from its rank files.

Rules: tensor-parallel ranks split attention.qkv per part, mlp.fc, mlp.gate and lm_head by rows, attention.dense and
mlp.proj by columns; KV heads are repeated when there are fewer than ranks; pipeline stages number their layers from 0;
a fused mlp.fc holds [up; gate] on every rank, and experts lie one below the other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape, stage_layers

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

ROWS_AT_ONCE = 1024
_SCRATCH_BYTES = 64 << 20  # of a scratch file at least; it is sparse, so what is not used costs nothing
_ALIGNMENT = 64


class RankFiles(Protocol):
    """What is read of `lpxbuild.checkpoint.read(path)`."""

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def shape(self) -> ModelShape: ...

    def tensor(self, name: str, rank: int) -> Array: ...

    def names(self, rank: int) -> frozenset[str]: ...

    def format_of(self, name: str) -> str: ...

    def weight_rows(self, name: str, rank: int, begin: int, end: int) -> Array: ...


@dataclass(frozen=True)
class Block:
    """Rows `begin` to `end` of one rank's tensor (as a matrix), which lie in the joined matrix from (`row`, `column`)
    on; `expert` is the number of the expert they belong to, 0 without experts."""

    rank: int
    begin: int
    end: int
    row: int
    column: int
    expert: int = 0


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer, (out, in), and the blocks of rank files that it is made of.

    Attributes:
        module: TensorRT-LLM's module, its layer counted within the stage ("transformer.layers.0.mlp.fc").
        columns: input features that each block has.
    """

    module: str
    shape: tuple[int, int]
    columns: int
    blocks: tuple[Block, ...]

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def side_by_side(self) -> bool:
        """Whether the ranks hold columns (row-parallel) and there is more than one."""
        return self.columns != self.shape[1]


class MergedWeights:
    """Joined tensors by TensorRT-LLM name with layers counted over the whole model.

    A tensor that lies whole in one rank file is handed out as it is mapped there. A joined one is written into an
    unlinked file in `scratch` and mapped, so that the anonymous memory of a build does not grow with the model.
    """

    def __init__(self, ranks: RankFiles, scratch: Path) -> None:
        import numpy as np

        self.ranks = ranks
        self.shape = ranks.shape
        self._scratch = scratch
        self._room: Array = np.empty(0, np.uint8)  # what is left of the last scratch file
        config = ranks.config
        mapping = config["mapping"]
        self.tensor_parallel: int = mapping["tp_size"]
        self.pipeline_parallel: int = mapping["pp_size"]
        self._embedding_by_rows = config.get("embedding_sharding_dim", 0) == 0
        self._embedding_is_split = bool(config.get("use_parallel_embedding")) and self.tensor_parallel > 1

    # Tables and vectors

    def embedding(self) -> Array:
        """[vocab_size, hidden_size], without padding rows."""
        return self._table("transformer.vocab_embedding.weight")[: self.shape.vocab_size]

    def positions(self) -> Array:
        """Learned positions, [max_position_embeddings, hidden_size]."""
        return self._table("transformer.position_embedding.weight")[: self.shape.max_position_embeddings]

    def lm_head(self) -> Array:
        """[vocab_size, hidden_size]; the embedding where the checkpoint has no head of its own."""
        first = (self.pipeline_parallel - 1) * self.tensor_parallel
        if "lm_head.weight" not in self.ranks.names(first):
            return self.embedding()
        parts = [self.ranks.tensor("lm_head.weight", first + rank) for rank in range(self.tensor_parallel)]
        return self._join(parts, 0)[: self.shape.vocab_size]

    def final(self, name: str) -> Array | None:
        """`transformer.<name>` of the last stage ("ln_f.weight"); None where it is absent."""
        rank = (self.pipeline_parallel - 1) * self.tensor_parallel
        full = f"transformer.{name}"
        return self.ranks.tensor(full, rank) if full in self.ranks.names(rank) else None

    def whole(self, layer: int, name: str) -> Array | None:
        """A tensor that every rank holds whole (norms, biases of row-parallel layers); None where it is absent."""
        local, first = self._local(layer, name)
        return self.ranks.tensor(local, first) if local in self.ranks.names(first) else None

    def required(self, layer: int, name: str) -> Array:
        """As `whole`, of a tensor that the graph cannot do without.

        Raises:
            SourceError: the rank files have no such tensor.
        """
        array = self.whole(layer, name)
        if array is None:
            raise missing(f"transformer.layers.{layer}.{name}")
        return array

    def by_rows(self, layer: int, name: str, *, half: int | None = None) -> Array | None:
        """A column-parallel bias, the ranks' pieces one after the other; `half` 0 or 1 of a fused [up; gate]."""
        local, first = self._local(layer, name)
        if local not in self.ranks.names(first):
            return None
        parts = [self.ranks.tensor(local, first + rank) for rank in range(self.tensor_parallel)]
        if half is not None:
            length = len(parts[0]) // 2
            parts = [part[half * length : (half + 1) * length] for part in parts]
        return self._join(parts, 0)

    def qkv_bias(self, layer: int) -> tuple[Array, Array, Array] | None:
        """Biases of query, key and value."""
        local, first = self._local(layer, "attention.qkv.bias")
        if local not in self.ranks.names(first):
            return None
        parts = [self.ranks.tensor(local, first + rank) for rank in range(self.tensor_parallel)]
        query, key, value = (
            self._join([parts[rank][begin:end] for rank, begin, end in spans], 0) for spans in self._qkv_spans()
        )
        return query, key, value

    # Matrices of linear layers

    def qkv(self, layer: int) -> tuple[Matrix, Matrix, Matrix]:
        """Query, key and value of all heads."""
        module, first = self._local(layer, "attention.qkv")
        hidden = self.shape.hidden_size

        def matrix(spans: Sequence[tuple[int, int, int]]) -> Matrix:
            blocks, row = [], 0
            for rank, begin, end in spans:
                blocks.append(Block(first + rank, begin, end, row, 0))
                row += end - begin
            return Matrix(module, (row, hidden), hidden, tuple(blocks))

        query, key, value = (matrix(spans) for spans in self._qkv_spans())
        return query, key, value

    def column_parallel(
        self, layer: int, name: str, size: int, *, halves: int = 1, half: int = 0, expert: int = 0
    ) -> Matrix:
        """[size, hidden_size]; with halves = 2, the `half` (0 = up, 1 = gate) of a fused [up; gate]."""
        module, first = self._local(layer, name)
        rows, hidden = size // self.tensor_parallel, self.shape.hidden_size
        start = (expert * halves + half) * rows
        blocks = tuple(
            Block(first + rank, start, start + rows, rank * rows, 0, expert) for rank in range(self.tensor_parallel)
        )
        return Matrix(module, (size, hidden), hidden, blocks)

    def row_parallel(self, layer: int, name: str, size: int, *, expert: int = 0) -> Matrix:
        """[hidden_size, size]."""
        module, first = self._local(layer, name)
        columns, hidden = size // self.tensor_parallel, self.shape.hidden_size
        start = expert * hidden
        blocks = tuple(
            Block(first + rank, start, start + hidden, 0, rank * columns, expert)
            for rank in range(self.tensor_parallel)
        )
        return Matrix(module, (hidden, size), columns, blocks)

    def block(self, matrix: Matrix, block: Block, suffix: str = "weight") -> Array:
        """What one rank file holds of a matrix, as rows × columns."""
        stored = self.ranks.tensor(f"{matrix.module}.{suffix}", block.rank)
        return stored.reshape(-1, stored.shape[-1])[block.begin : block.end]

    def vector(self, matrix: Matrix, block: Block, suffix: str) -> Array | None:
        """A scale beside the weight, flat: one number, one for each expert, row or column; None where it is absent."""
        name = f"{matrix.module}.{suffix}"
        if name not in self.ranks.names(block.rank):
            return None
        return self.ranks.tensor(name, block.rank).reshape(-1)

    def scratch_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array in an unlinked file, for tensors made during the build. Many share one file: a process may
        map only some 65,000, and a model with many experts has more matrices than that."""
        import numpy as np

        size = np.dtype(dtype).itemsize * prod(shape)
        if size > len(self._room):
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                self._room = np.memmap(file, dtype=np.uint8, mode="w+", shape=(max(size, _SCRATCH_BYTES),))
        array: Array = self._room[:size].view(dtype).reshape(shape)
        self._room = self._room[-(-size // _ALIGNMENT) * _ALIGNMENT :]
        return array

    def _qkv_spans(self) -> tuple[list[tuple[int, int, int]], ...]:
        """(rank of the stage, first row, end) of the query rows, key rows and value rows of a rank's [Q; K; V]."""
        ranks, head = self.tensor_parallel, self.shape.head_size
        query = self.shape.num_attention_heads // ranks * head
        key = max(self.shape.num_key_value_heads // ranks, 1) * head
        # With fewer KV heads than ranks, ranks / kv_heads neighbours hold the same head.
        holders = range(0, ranks, max(ranks // self.shape.num_key_value_heads, 1))
        return (
            [(rank, 0, query) for rank in range(ranks)],
            [(rank, query, query + key) for rank in holders],
            [(rank, query + key, query + 2 * key) for rank in holders],
        )

    def _table(self, name: str) -> Array:
        if not self._embedding_is_split:
            return self.ranks.tensor(name, 0)
        parts = [self.ranks.tensor(name, rank) for rank in range(self.tensor_parallel)]
        return self._join(parts, 0 if self._embedding_by_rows else 1)

    def _join(self, parts: Sequence[Array], axis: int) -> Array:
        import numpy as np

        if len(parts) == 1:
            return parts[0]
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        joined = self.scratch_array(tuple(shape), parts[0].dtype)
        np.concatenate(parts, axis=axis, out=joined)
        return joined

    def _local(self, layer: int, name: str) -> tuple[str, int]:
        """Name within its pipeline stage, and the first rank of that stage. The first stages take the extra layers."""
        stages = stage_layers(self.shape.num_hidden_layers, self.pipeline_parallel)
        stage = next(index for index, layers in enumerate(stages) if layer in layers)
        return f"transformer.layers.{layer - stages[stage].start}.{name}", stage * self.tensor_parallel


def in_steps(begin: int, end: int, step: int = ROWS_AT_ONCE) -> Iterator[tuple[int, int]]:
    """Half-open ranges of at most `step` that cover begin to end."""
    for start in range(begin, end, step):
        yield start, min(start + step, end)


def missing(name: str) -> SourceError:
    """The refusal of a checkpoint without a tensor."""
    return SourceError(
        f"the checkpoint has no {name}",
        why="the openvino engine builds its graph from the rank files alone",
        next="convert the model again (lpx build --to checkpoint --force)",
    )
