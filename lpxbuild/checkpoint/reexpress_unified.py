"""Quantized sources as unified Hugging Face checkpoints: unchanged, or under ModelOpt's names.

vLLM loads every method as it is, so its checkpoints are the source's own files. TensorRT-LLM's PyTorch backend reads
ModelOpt's names and DeepSeek's FP8 blocks only, so what has an equal form there is written in it; the rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lpxbuild.checkpoint.reexpress_scales import (
    fp4_block_scales,
    fp4_codes,
    group_scales,
    largest_fp4_scale,
)
from lpxbuild.checkpoint.unified.checks import check_unified
from lpxbuild.checkpoint.unified.modules import Group, Module
from lpxbuild.checkpoint.unified.writing import ROW_BLOCK, Place
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.quantization import int4
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source.quantized import ORIGINAL, Read, SourceQuantization, check_backend, renamed
from lpxbuild.source.quantized.arrays import mapped
from lpxbuild.source.quantized.integers import IntLinear
from lpxbuild.source.quantized.linears import Fp4Linear, Fp8Linear

if TYPE_CHECKING:
    from lpxbuild.source import Source


def check_source(source: Source, backend: str | None) -> None:
    """Refuse a quantized source that the backend's loader would misread: the same answers as for a recipe's formats.

    Only weights under ModelOpt's names are looked at; other methods are the business of their loaders.

    Raises:
        SourceError: names modules and formats.
    """
    quantization = source.quantization
    assert quantization is not None
    check_backend(quantization, source.shape, backend)
    if quantization.method != "modelopt" and not renamed(quantization, source.shape, backend):
        return
    try:
        check_unified(source.shape, modelopt_scheme(quantization), backend=backend)
    except (RecipeError, SourceError) as error:
        others = [name for name in quantization.loaders if name != backend]
        raise SourceError(
            f"the source is already quantized ({quantization.title}); {error.what}",
            why=error.why,
            next=f"build for backend {' or '.join(others)}, or {ORIGINAL}" if others else ORIGINAL,
        ) from error


def modelopt_scheme(quantization: SourceQuantization) -> Scheme:
    """The scheme under ModelOpt's names: integers in groups are W4A16_AWQ there, with factors or without."""
    scheme = quantization.scheme
    renamed = {"int4_rtn": "int4_awq"}
    return replace(
        scheme,
        format=renamed.get(scheme.format, scheme.format),
        overrides={name: renamed.get(one, one) for name, one in scheme.overrides.items()},
    )


def cache_calibration(source: Source) -> Calibration:
    """The scales of a source's KV cache as a calibration tells them: largest keys and values."""
    assert source.quantization is not None
    read, found = mapped(source.tensors), {}
    for attention in source.quantization.key_value_scales:
        scales = source.quantization.key_value_scale(read, attention, source.tensors)
        for kind, scale in zip("kv", scales):
            found[f"{attention}.{kind}_bmm_quantizer._amax"] = np.array([scale * 448.0])
    return Calibration(found)


@dataclass(frozen=True)
class QuantizedWork:
    """The quantized modules of one group, written under ModelOpt's names.

    Loaders stack the modules of a group, so these share the scale of the input and NVFP4's global scale.
    """

    group: Group
    quantization: SourceQuantization
    read: Read

    def __call__(self, place: Place) -> None:
        """Write all tensors of the group."""
        linears: list[Any] = [self.quantization.linears[module.name] for module in self.group.modules]
        for module, linear in zip(self.group.modules, linears):
            if linear.format in ("fp8", "nvfp4"):
                largest = max(one.input_scale(self.read) for one in linears)
                place.number(linear.name("input_scale"), largest)
            if isinstance(linear, Fp8Linear):
                self._fp8(place, linear, module)
            elif isinstance(linear, Fp4Linear):
                self._fp4(place, linear, module, largest_fp4_scale(linears, self.read))
            else:
                self._int4(place, linear, module)

    def _fp8(self, place: Place, linear: Fp8Linear, module: Module) -> None:
        rows = linear.shape[0]
        scales = linear.row_scales(self.read, 0, rows)
        place.put(linear.name("weight_scale"), scales[:1] if linear.format == "fp8" else scales)
        for begin, end in _blocks(module, 1):
            place.put(linear.name("weight"), linear.codes(self.read, begin, end), begin)

    def _fp4(self, place: Place, linear: Fp4Linear, module: Module, common: np.float32) -> None:
        place.number(linear.name("weight_scale_2"), float(common))
        for begin, end in _blocks(module, 1):
            place.put(linear.name("weight"), fp4_codes(linear, self.read, begin, end, common), begin)
            place.put(linear.name("weight_scale"), fp4_block_scales(linear, self.read, begin, end, common), begin)

    def _int4(self, place: Place, linear: IntLinear, module: Module) -> None:
        size = self.quantization.group_size
        for begin, end in _blocks(module, 2):
            place.put(linear.name("weight"), int4.pack_rows(linear.codes(self.read, begin, end)), begin // 2)
            place.put(linear.name("weight_scale"), group_scales(linear, self.read, begin, end, size), begin)


def _blocks(module: Module, multiple: int) -> Iterator[tuple[int, int]]:
    rows, columns = module.shape
    step = max(multiple, ROW_BLOCK // columns // multiple * multiple)
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)
