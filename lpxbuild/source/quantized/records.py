"""What is known of a quantized source before a weight is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lpxbuild.quantization.formats import Layout
from lpxbuild.quantization.scheme import Scheme

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Float32 = npt.NDArray[np.float32]

Read = Callable[[str], Any]
"""A tensor of the files by name, as a read-only array that lies in the file's pages (see `arrays.mapped`)."""

FLOATS = ("F32", "F16", "BF16")
"""Safetensors' names of the types that a scale may have."""


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that the method stores for a linear: its full name, and the types and shapes that are right."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True


@dataclass(frozen=True)
class QuantizedLinear(ABC):
    """The quantized weight of one Hugging Face module.

    Attributes:
        module: "model.layers.0.self_attn.q_proj".
        shape: (out, in) of the matrix that the tensors stand for.
        format: lpx's name of the format it can be expressed in without loss; None = in none.
    """

    module: str
    shape: tuple[int, int]
    format: str | None

    @property
    @abstractmethod
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """Everything the files hold for this module's weight, in place of `<module>.weight`."""

    @abstractmethod
    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """Rows begin … end of the matrix that the model multiplies with, (rows, in): scales, zero points and factors
        of the input multiplied in."""

    def name(self, suffix: str) -> str:
        """Full name of one of the module's tensors."""
        return f"{self.module}.{suffix}"


@dataclass(frozen=True)
class SourceQuantization:
    """The quantization of a whole source.

    Attributes:
        method: as config.json names it ("gptq").
        title: the method for messages ("GPTQ").
        where: file and key that say it.
        linears: every quantized module.
        unquantized: linear modules of the layers that have plain weights.
        group_size: input features that share a scale in what lpx writes; 128 where the format has none.
        kv_cache: "none" or "fp8".
        key_value_scales: attention module → names of the scale tensors of keys and values.
        refused: layout → (why it cannot go there, what to do).
        notices: what the user should know.
        loaders: engines that load the files as they are.
    """

    method: str
    title: str
    where: str
    linears: Mapping[str, QuantizedLinear]
    unquantized: tuple[str, ...] = ()
    group_size: int = 128
    kv_cache: str = "none"
    key_value_scales: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    refused: Mapping[Layout, tuple[str, str]] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    loaders: tuple[str, ...] = ("vllm",)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that the source can go to."""
        layouts: tuple[Layout, ...] = ("tensorrt_llm", "unified_hf")
        return tuple(layout for layout in layouts if layout not in self.refused)

    @property
    def format(self) -> str | None:
        """The format that most linears have; None where it is none of lpx's."""
        formats = Counter(linear.format for linear in self.linears.values())
        return max(formats, key=lambda name: (formats[name], name or "")) if formats else None

    @property
    def scheme(self) -> Scheme:
        """The scheme that describes what is there; the format "none" stands for one that lpx does not write."""
        main = self.format or "none"
        others = {name: one.format for name, one in self.linears.items() if one.format and one.format != main}
        return Scheme(main, self.kv_cache, self.group_size, self.unquantized, others)

    @property
    def expected(self) -> dict[str, ExpectedTensor]:
        """Every tensor of the method by name, scales of the KV cache included (a file may lack those)."""
        tensors = {tensor.name: tensor for linear in self.linears.values() for tensor in linear.tensors}
        for names in self.key_value_scales.values():
            tensors |= {name: ExpectedTensor(name, FLOATS, ((), (1,)), required=False) for name in names}
        return tensors

    def holds(self, weight: str) -> bool:
        """Whether "<module>.weight" is the weight of a quantized module."""
        return weight.removesuffix(".weight") in self.linears

    def key_value_scale(self, read: Read, attention: str, present: Mapping[str, Any]) -> tuple[float, float]:
        """Scales of keys and values of an attention module ("model.layers.0.self_attn"): value ≈ stored · scale.

        1.0 where the files have none: engines take that then.
        """
        key, value = (
            float(read(name).reshape(-1)[0]) if name in present else 1.0 for name in self.key_value_scales[attention]
        )
        return key, value
