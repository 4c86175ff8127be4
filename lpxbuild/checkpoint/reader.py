"""Reads a checkpoint that lpx wrote: rank by rank, or put together again."""

from __future__ import annotations

import json
import mmap
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import NUMPY_TYPES, SAFETENSORS_NAMES, Array
from lpxbuild.checkpoint.config import shape_from_config
from lpxbuild.checkpoint.layout import Piece, RankTensor, plan
from lpxbuild.checkpoint.rank_file import RankFile, rank_file_name
from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape

_REBUILD = "Build it again: `lpx build RECIPE --to checkpoint --force`."


class CheckpointReader:
    """A complete checkpoint, mapped read-only.

    Attributes:
        path: the folder.
        config: config.json as read.
        shape: the model; `dtype` is the checkpoint's.
        tensor_parallel, pipeline_parallel: its ranks.
        tokenizer: the folder `tokenizer/`, or None where the source had none.

    Arrays are views of the files in the checkpoint's dtype (bfloat16 as ml_dtypes.bfloat16), not writable.
    Names are TensorRT-LLM's; where a method says *global*, layers count through all pipeline stages.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = config
        self.shape: ModelShape = shape_from_config(config)
        self.tensor_parallel: int = config["mapping"]["tp_size"]
        self.pipeline_parallel: int = config["mapping"]["pp_size"]
        self.tokenizer: Path | None = path / "tokenizer" if (path / "tokenizer").is_dir() else None
        self._dtype = NUMPY_TYPES[SAFETENSORS_NAMES[self.shape.dtype]]
        self._by_rank: dict[int, dict[str, RankTensor]] = defaultdict(dict)
        self._by_global_name: dict[str, list[RankTensor]] = defaultdict(list)
        for tensor in plan(self.shape, self.tensor_parallel, self.pipeline_parallel):
            self._by_rank[tensor.rank][tensor.name] = tensor
            self._by_global_name[tensor.global_name].append(tensor)
        self._data = {rank: self._open(rank) for rank in self._by_rank}

    @property
    def world(self) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel)."""
        return self.tensor_parallel, self.pipeline_parallel

    def names(self, rank: int) -> tuple[str, ...]:
        """Tensor names of one rank file; layers count from the start of its stage."""
        return tuple(self._by_rank[rank])

    def tensor(self, name: str, rank: int) -> Array:
        """One tensor of one rank file."""
        planned = self._by_rank[rank][name]
        data, offsets = self._data[rank]
        return np.frombuffer(data, self._dtype, planned.size, offsets[name]).reshape(planned.shape)

    @property
    def global_names(self) -> tuple[str, ...]:
        """Names of all tensors of the model, layers counted through all stages."""
        return tuple(self._by_global_name)

    def shards(self, global_name: str) -> tuple[Array, ...]:
        """A tensor of the model as its stage's ranks hold it, in the order of the tensor-parallel ranks."""
        return tuple(self.tensor(planned.name, planned.rank) for planned in self._by_global_name[global_name])

    def merge(self, global_name: str) -> Array:
        """A tensor of the model as one rank would hold it: shards joined, KV-head copies and vocabulary padding gone.

        A view with one tensor-parallel rank, else a copy.
        """
        if self.tensor_parallel == 1:
            return self.shards(global_name)[0]
        whole = self._whole[global_name]
        merged = np.empty(whole.shape, self._dtype)
        rows = merged.reshape(whole.shape[0], -1)
        for piece in whole.pieces:
            part = self.source_tensor(piece.source, global_name)
            rows[piece.at : piece.at + part.shape[0]] = part.reshape(part.shape[0], -1)
        return merged

    def source_tensor(self, name: str, global_name: str) -> Array:
        """The Hugging Face tensor `name` (q_proj, …) joined from the shards of `global_name` (….qkv.weight)."""
        (whole,) = (piece for piece in self._whole[global_name].pieces if piece.source == name)
        rows, columns = whole.rows[1], whole.columns[1]
        joined = np.empty((rows, columns), self._dtype)
        for planned in self._by_global_name[global_name]:
            shard = self.tensor(planned.name, planned.rank).reshape(planned.shape[0], -1)
            for piece in planned.pieces:
                if piece.source == name:
                    joined[slice(*piece.rows), slice(*piece.columns)] = _rows_of(shard, piece)
        return joined if len(self._whole[global_name].shape) == 2 else joined.reshape(rows)

    @cached_property
    def _whole(self) -> dict[str, RankTensor]:
        return {tensor.name: tensor for tensor in plan(self.shape, 1, 1)}

    def _open(self, rank: int) -> tuple[mmap.mmap, dict[str, int]]:
        path = self.path / rank_file_name(rank)
        expected = RankFile.of(path, list(self._by_rank[rank].values()), SAFETENSORS_NAMES[self.shape.dtype])
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size != expected.size:
                    raise _damaged(path, f"It has {size} bytes, {expected.size} are expected.")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _damaged(path, f"{error.strerror}.") from error
        if data[: len(expected.header)] != expected.header:
            raise _damaged(path, "Its header does not describe the tensors that config.json asks for.")
        return data, expected.offsets


def _rows_of(shard: Array, piece: Piece) -> Array:
    return shard[piece.at : piece.at + piece.rows[1] - piece.rows[0]]


def _damaged(path: Path, why: str) -> SourceError:
    state = "is damaged" if path.exists() else "is missing"
    return SourceError(f"{path.name} of the checkpoint {state} ({path}).", why=why, next=_REBUILD)


def read(path: Path) -> CheckpointReader:
    """Open a checkpoint that lpx wrote.

    Raises:
        SourceError: config.json or a rank file is missing or damaged; names the file.
    """
    try:
        config = json.loads((path / "config.json").read_text())
    except OSError as error:
        raise _damaged(path / "config.json", f"{error.strerror}.") from error
    except ValueError as error:
        raise _damaged(path / "config.json", f"It is not valid JSON: {error}.") from error
    try:
        return CheckpointReader(path, config)
    except KeyError as error:
        raise _damaged(path / "config.json", f"Its key {error} is missing.") from error
