"""model.safetensors, or model-00001-of-0000N.safetensors and their index, laid out before any data is written."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}
"""Bytes of an element by safetensors' name of its type."""
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Largest shard, as transformers' `save_pretrained` cuts by default; one tensor alone may be larger."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint: its name, safetensors' name of its type, its shape (() = one number)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """One file: its header, and where each tensor begins (bytes from the start of the file)."""

    path: Path
    header: bytes
    offsets: dict[str, int]
    size: int

    @classmethod
    def of(cls, path: Path, tensors: Sequence[StoredTensor]) -> Shard:
        """Lay out a file of `tensors` in their order, without holes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        position = 0
        # Larger elements first, so that each tensor begins at a multiple of its element's size.
        for tensor in sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
            end = position + tensor.nbytes
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [position, end],
            }
            offsets[tensor.name] = position
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        return cls(path, header, {name: len(header) + at for name, at in offsets.items()}, len(header) + position)

    def create(self) -> int:
        """Create the file in its full size; returns an open descriptor.

        Raises:
            OSError: no space, or larger than this process may write.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(descriptor, self.size)
            os.pwrite(descriptor, self.header, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def split(folder: Path, tensors: Sequence[StoredTensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[Shard, ...]:
    """The files of a checkpoint; a new one begins where the next tensor would not fit any more."""
    parts: list[list[StoredTensor]] = []
    filled = 0
    for tensor in tensors:
        if not parts or (filled and filled + tensor.nbytes > max_shard_bytes):
            parts.append([])
            filled = 0
        parts[-1].append(tensor)
        filled += tensor.nbytes
    if len(parts) == 1:
        return (Shard.of(folder / WHOLE, parts[0]),)
    return tuple(
        Shard.of(folder / f"model-{number:05d}-of-{len(parts):05d}.safetensors", part)
        for number, part in enumerate(parts, 1)
    )


def index_text(shards: Sequence[Shard], total_bytes: int) -> str:
    """The index as transformers writes it: tensor → file, and the bytes of all tensors."""
    weight_map = {name: shard.path.name for shard in shards for name in shard.offsets}
    return (
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
    )
