"""What the source stage hands on: a Hugging Face folder that was checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.families.shape import ModelShape

if TYPE_CHECKING:
    from lpxbuild.quantization.scheme import Scheme
    from lpxbuild.source.quantized import SourceQuantization


@dataclass(frozen=True)
class SourceFile:
    """A file that the build reads: name within the folder, size in bytes, SHA-256 where the hub's metadata told it."""

    name: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `begin` and `end` are absolute byte offsets in `file`; `dtype` as safetensors spells it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Source:
    """A checked Hugging Face folder.

    Attributes:
        path: the folder.
        origin: what the recipe named (hub id, folder, `.gguf`).
        revision: the commit of a hub repository, None elsewhere.
        files: everything the build reads, sorted by name.
        shape: the normalised config.
        tensors: every tensor of the model by its Hugging Face name; known-harmless buffers are left out.
        end_ids: all ids that end a generation; the first is the primary one.
        pad_id: padding id; the primary end id where the model names none.
        notices: what the user should know, already given to the output.
        quantization: how the weights are quantized already; None = they are plain.
    """

    path: Path
    origin: str
    revision: str | None
    files: tuple[SourceFile, ...]
    config: dict[str, Any]
    generation_config: dict[str, Any]
    shape: ModelShape
    tensors: Mapping[str, TensorEntry]
    end_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None
    notices: tuple[str, ...]
    quantization: SourceQuantization | None = None

    @property
    def parameters(self) -> int:
        """Elements of the model; of a quantized source, of what its tensors stand for."""
        if self.quantization is None:
            return sum(prod(entry.shape) for entry in self.tensors.values())
        stored = self.quantization.expected
        plain = sum(prod(entry.shape) for name, entry in self.tensors.items() if name not in stored)
        return plain + sum(prod(linear.shape) for linear in self.quantization.linears.values())

    def scheme(self, asked: Scheme) -> Scheme:
        """What a checkpoint of it gets: its own quantization where it has one, else the recipe's."""
        return asked if self.quantization is None else self.quantization.scheme
