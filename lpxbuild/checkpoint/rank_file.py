"""rank{N}.safetensors: laid out before the first byte of data is written, so that workers can fill it in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from lpxbuild.checkpoint.cast import STORED_TYPES
from lpxbuild.checkpoint.quantized_layout import StoredTensor


def rank_file_name(rank: int) -> str:
    """`rank0.safetensors`, as TensorRT-LLM looks for it."""
    return f"rank{rank}.safetensors"


@dataclass(frozen=True)
class RankFile:
    """One rank file: its header, and where each tensor begins (bytes from the start of the file)."""

    path: Path
    header: bytes
    offsets: dict[str, int]
    size: int

    @classmethod
    def of(cls, path: Path, tensors: Sequence[StoredTensor]) -> RankFile:
        """Lay out `tensors`: those with the largest elements first, else in their order, without holes."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        position = 0
        # As safetensors' own writer does, so that every element lies aligned.
        for tensor in sorted(tensors, key=lambda tensor: -STORED_TYPES[tensor.dtype].itemsize):
            end = position + prod(tensor.shape) * STORED_TYPES[tensor.dtype].itemsize
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
            offsets[tensor.name] = position
            position = end
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data begins aligned, as safetensors' own writer does
        header = len(text).to_bytes(8, "little") + text
        return cls(
            path,
            header,
            {name: len(header) + offset for name, offset in offsets.items()},
            len(header) + position,
        )

    def create(self) -> int:
        """Create the file in its full size, holes reading as zero; returns an open descriptor.

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
