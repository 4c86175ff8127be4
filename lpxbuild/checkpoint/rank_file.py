"""rank{N}.safetensors: laid out before the first byte of data is written, so that workers can fill it in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lpxbuild.checkpoint.cast import NUMPY_TYPES
from lpxbuild.checkpoint.layout import RankTensor


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
    def of(cls, path: Path, tensors: Sequence[RankTensor], dtype: str) -> RankFile:
        """Lay out `tensors` in their order, without holes; `dtype` (safetensors' name) is of those without one."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        position = 0
        for tensor in tensors:
            stored = tensor.dtype or dtype
            end = position + tensor.size * NUMPY_TYPES[stored].itemsize
            entries[tensor.name] = {"dtype": stored, "shape": list(tensor.shape), "data_offsets": [position, end]}
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
