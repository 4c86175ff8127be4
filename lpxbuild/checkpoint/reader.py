"""Reads a checkpoint that lpx wrote, rank by rank."""

from __future__ import annotations

import json
import mmap
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lpxbuild.checkpoint.cast import SAFETENSORS_NAMES, STORED_TYPES, Array
from lpxbuild.checkpoint.config import shape_from_config
from lpxbuild.checkpoint.layout import plan
from lpxbuild.checkpoint.quantized_layout import PLAIN, WEIGHT, StoredTensor, stored_tensors
from lpxbuild.checkpoint.quantized_rows import decoded_rows
from lpxbuild.checkpoint.rank_file import RankFile, rank_file_name
from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape
from lpxbuild.families.reading import positive_int
from lpxbuild.quantization.scheme import Scheme

_REBUILD = "build it again: lpx build RECIPE --to checkpoint --force"


class CheckpointReader:
    """A complete checkpoint, mapped read-only.

    Attributes:
        path: the folder.
        config: config.json as read.
        shape: the model; `dtype` is the checkpoint's.
        scheme: formats of its linears, and of its KV cache.
        tensor_parallel, pipeline_parallel: its ranks.

    Arrays are views of the files in the type that each tensor has there (bfloat16 and FP8 as ml_dtypes), not writable.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.shape: ModelShape = shape_from_config(config)
        self.tensor_parallel: int = positive_int(config["mapping"], "tp_size")
        self.pipeline_parallel: int = positive_int(config["mapping"], "pp_size")
        # The norms alone take more than this: a number that the files cannot hold is not worked through.
        stored = sum(file.stat().st_size for file in path.glob("rank*.safetensors"))
        if stored and self.shape.num_hidden_layers * self.shape.hidden_size > stored:
            raise _damaged(path / "config.json", f"{self.shape.num_hidden_layers} layers do not fit in the ranks")
        self.scheme = Scheme.from_dict(config["lpx"]["scheme"])
        self._by_rank: dict[int, dict[str, StoredTensor]] = defaultdict(dict)
        self._formats: dict[str, str] = {}
        tensors = plan(self.shape, self.tensor_parallel, self.pipeline_parallel)
        for tensor in stored_tensors(tensors, self.scheme, SAFETENSORS_NAMES[self.shape.dtype]):
            self._by_rank[tensor.rank][tensor.name] = tensor
            if tensor.planned.linear is not None and tensor.suffix == WEIGHT:
                self._formats[tensor.name] = tensor.format
        self._data = {rank: self._open(rank) for rank in self._by_rank}

    @property
    def world(self) -> tuple[int, int]:
        """(tensor parallel, pipeline parallel)."""
        return self.tensor_parallel, self.pipeline_parallel

    def names(self, rank: int) -> frozenset[str]:
        """Tensor names of one rank file; layers count from the start of its stage."""
        return frozenset(self._by_rank[rank])

    def tensor(self, name: str, rank: int) -> Array:
        """One tensor of one rank file, as it is stored."""
        stored = self._by_rank[rank][name]
        data, offsets = self._data[rank]
        return np.frombuffer(data, STORED_TYPES[stored.dtype], prod(stored.shape), offsets[name]).reshape(stored.shape)

    def format_of(self, name: str) -> str:
        """lpx's name of the format of a linear, by the name of its weight ("transformer.layers.0.mlp.fc.weight").

        "none" for every other tensor. Of several pipeline stages the layers of the same number have the same format.
        """
        return self._formats.get(name, "none")

    def weight_rows(self, name: str, rank: int, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows begin … end of the matrix that a linear multiplies its input with, (rows, in) float32.

        Scales and factors of the input are multiplied in; rows of experts lie one below the other, (experts · out, in).
        Of `int8_wo` and `int4_wo`, and of unquantized tensors, these are the plain values.
        """
        stored = self._by_rank[rank][name]
        if stored.format in PLAIN:
            plain = self.tensor(name, rank)
            rows: npt.NDArray[np.float32] = plain.reshape(-1, plain.shape[-1])[begin:end].astype(np.float32)
            return rows
        prefix = name.removesuffix(WEIGHT)
        group = self.scheme.group_size
        return decoded_rows(
            stored.format,
            stored.planned.shape,
            group,
            lambda suffix: self.tensor(f"{prefix}{suffix}", rank),
            begin,
            end,
        )

    def _open(self, rank: int) -> tuple[mmap.mmap, dict[str, int]]:
        path = self.path / rank_file_name(rank)
        expected = RankFile.of(path, list(self._by_rank[rank].values()))
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size != expected.size:
                    raise _damaged(path, f"it has {size} bytes, {expected.size} are expected")
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise _damaged(path, f"{error.strerror}") from error
        if data[: len(expected.header)] != expected.header:
            raise _damaged(path, "its header does not describe the tensors that config.json asks for")
        return data, expected.offsets


def _damaged(path: Path, why: str) -> SourceError:
    state = "is damaged" if path.exists() else "is missing"
    return SourceError(f"{path.name} of the checkpoint {state} ({path})", why=why, next=_REBUILD)


def read(path: Path) -> CheckpointReader:
    """Open a checkpoint that lpx wrote.

    Raises:
        SourceError: config.json or a rank file is missing or damaged; names the file.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
    except OSError as error:
        raise _damaged(path / "config.json", f"{error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path / "config.json", f"it is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise _damaged(path / "config.json", "it is not a JSON object")
    try:
        return CheckpointReader(path, config)
    except KeyError as error:
        raise _damaged(path / "config.json", f"its key {error} is missing") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise _damaged(path / "config.json", f"a value is of the wrong kind: {error}") from error
