"""The whole tensors of a TensorRT-LLM checkpoint, joined from its rank files.

Rules: tensor-parallel ranks split attention.qkv per part, mlp.fc, mlp.gate and lm_head by rows, attention.dense and
mlp.proj by columns; KV heads are repeated when there are fewer than ranks; pipeline stages number their layers from 0.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lpxbuild.families import stage_layers

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class RankFiles(Protocol):
    """What is read of `lpxbuild.checkpoint.read(path)`."""

    @property
    def config(self) -> dict[str, Any]: ...

    def tensor(self, name: str, rank: int) -> Array: ...

    def names(self, rank: int) -> frozenset[str]: ...


class MergedWeights:
    """Joined tensors by TensorRT-LLM name with layers counted over the whole model.

    A tensor that lies whole in one rank file is handed out as it is mapped there. A joined one is written into an
    unlinked file in `scratch` and mapped, so that the anonymous memory of a build does not grow with the model.
    """

    def __init__(self, ranks: RankFiles, scratch: Path) -> None:
        self._ranks = ranks
        self._scratch = scratch
        config = ranks.config
        mapping = config["mapping"]
        self.tensor_parallel: int = mapping["tp_size"]
        self.pipeline_parallel: int = mapping["pp_size"]
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_size: int = config.get("head_size") or config["hidden_size"] // self.heads
        self.vocab_size: int = config["vocab_size"]
        self._embedding_by_rows = config.get("embedding_sharding_dim", 0) == 0
        self._embedding_is_split = bool(config.get("use_parallel_embedding")) and self.tensor_parallel > 1

    def embedding(self) -> Array:
        """[vocab_size, hidden_size], without padding rows."""
        name = "transformer.vocab_embedding.weight"
        if not self._embedding_is_split:
            return self._ranks.tensor(name, 0)[: self.vocab_size]
        parts = [self._ranks.tensor(name, rank) for rank in range(self.tensor_parallel)]
        return self._join(parts, 0 if self._embedding_by_rows else 1)[: self.vocab_size]

    def lm_head(self) -> Array:
        """[vocab_size, hidden_size]; the embedding where the checkpoint has no head of its own."""
        first = (self.pipeline_parallel - 1) * self.tensor_parallel
        if "lm_head.weight" not in self._ranks.names(first):
            return self.embedding()
        parts = [self._ranks.tensor("lm_head.weight", first + rank) for rank in range(self.tensor_parallel)]
        return self._join(parts, 0)[: self.vocab_size]

    def final_norm(self) -> Array:
        """[hidden_size]"""
        return self._ranks.tensor("transformer.ln_f.weight", (self.pipeline_parallel - 1) * self.tensor_parallel)

    def whole(self, layer: int, name: str) -> Array | None:
        """A tensor that every rank holds whole (norms, biases of row-parallel layers); None where it is absent."""
        local, first = self._local(layer, name)
        return self._ranks.tensor(local, first) if local in self._ranks.names(first) else None

    def by_rows(self, layer: int, name: str) -> Array | None:
        """A column-parallel tensor (mlp.fc, mlp.gate and their biases): the ranks' rows one after the other."""
        parts = self.parts(layer, name)
        return self._join(parts, 0) if parts else None

    def parts(self, layer: int, name: str) -> list[Array]:
        """The pieces of one tensor in the order of the ranks; empty where it is absent."""
        local, first = self._local(layer, name)
        if local not in self._ranks.names(first):
            return []
        return [self._ranks.tensor(local, first + rank) for rank in range(self.tensor_parallel)]

    def qkv(self, layer: int, kind: str) -> tuple[Array, Array, Array] | None:
        """`attention.qkv.<kind>` taken apart: rows of all query heads, of all key heads, of all value heads."""
        parts = self.parts(layer, f"attention.qkv.{kind}")
        if not parts:
            return None
        ranks = self.tensor_parallel
        q_rows = self.heads // ranks * self.head_size
        kv_rows = max(self.kv_heads // ranks, 1) * self.head_size
        # With fewer KV heads than ranks, ranks / kv_heads neighbours hold the same head.
        kv_parts = parts[:: max(ranks // self.kv_heads, 1)]
        return (
            self._join([part[:q_rows] for part in parts], 0),
            self._join([part[q_rows : q_rows + kv_rows] for part in kv_parts], 0),
            self._join([part[q_rows + kv_rows : q_rows + 2 * kv_rows] for part in kv_parts], 0),
        )

    def join_rows(self, parts: Sequence[Array]) -> Array:
        """Column-parallel pieces one below the other: [out, in]."""
        return self._join(parts, 0)

    def join_columns(self, parts: Sequence[Array]) -> Array:
        """Row-parallel pieces side by side: [out, in]."""
        return self._join(parts, 1)

    def scratch_array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """A zeroed array backed by an unlinked file, for tensors made during the build."""
        import numpy as np

        with tempfile.TemporaryFile(dir=self._scratch) as file:
            array: Array = np.memmap(file, dtype=dtype, mode="w+", shape=shape)
            return array

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
        stages = stage_layers(self.layers, self.pipeline_parallel)
        stage = next(index for index, layers in enumerate(stages) if layer in layers)
        return f"transformer.layers.{layer - stages[stage].start}.{name}", stage * self.tensor_parallel
