"""Errors planted into a checkpoint: tensors of its rank files changed in place, its config edited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "U8": np.uint8,
}
Array = Any


class Planted:
    """A checkpoint folder that is about to be damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ranks = len(list(folder.glob("rank*.safetensors")))

    def tensors(self, rank: int) -> tuple[bytearray, dict[str, Array]]:
        """The file, and writable views into it."""
        data = bytearray((self.folder / f"rank{rank}.safetensors").read_bytes())
        size = int.from_bytes(data[:8], "little")
        header = json.loads(bytes(data[8 : 8 + size]))
        views = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype = np.dtype(TYPES[entry["dtype"]])
            count = (end - begin) // dtype.itemsize
            views[name] = np.frombuffer(data, dtype, count, 8 + size + begin).reshape(entry["shape"])
        return data, views

    def change(self, change: Callable[[dict[str, Array]], None]) -> None:
        """The same change to every rank."""
        for rank in range(self.ranks):
            data, views = self.tensors(rank)
            change(views)
            (self.folder / f"rank{rank}.safetensors").write_bytes(data)

    def set(self, name: str, change: Callable[[Array], Array]) -> None:
        """One tensor of every rank becomes `change(tensor)`, of the same shape and type."""

        def apply(views: dict[str, Array]) -> None:
            views[name][...] = change(views[name].copy())

        self.change(apply)

    def swap(self, one: str, other: str) -> None:
        """Exchange two tensors in every rank."""

        def apply(views: dict[str, Array]) -> None:
            first = views[one].copy()
            views[one][...] = views[other]
            views[other][...] = first

        self.change(apply)

    def exchange_ranks(self, name: str | None = None) -> None:
        """Rank 0 gets what rank 1 has, and the other way round: one tensor, or the whole files."""
        (zero, of_zero), (one, of_one) = self.tensors(0), self.tensors(1)
        for each in [name] if name is not None else list(of_zero):
            kept = of_zero[each].copy()
            of_zero[each][...] = of_one[each]
            of_one[each][...] = kept
        (self.folder / "rank0.safetensors").write_bytes(zero)
        (self.folder / "rank1.safetensors").write_bytes(one)

    def config(self, **fields: Any) -> None:
        """Replace fields of config.json."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def own(self, **fields: Any) -> None:
        """Replace fields under `lpx`."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        self.config(lpx=config["lpx"] | fields)


def layer(number: int, name: str) -> str:
    return f"transformer.layers.{number}.{name}"
