"""Rows of quantized modules brought to a common scale; a module that has it already keeps its bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lpxbuild.quantization import fp8, nvfp4
from lpxbuild.source.quantized import Read
from lpxbuild.source.quantized.integers import IntLinear
from lpxbuild.source.quantized.linears import Fp4Linear, Fp8Linear

Array = npt.NDArray[Any]


def largest_fp8_scale(modules: Sequence[Fp8Linear], read: Read) -> np.float32:
    """The largest weight scale of modules with one scale each."""
    return np.float32(max(module.row_scales(read, 0, 1)[0] for module in modules))


def largest_fp4_scale(modules: Sequence[Fp4Linear], read: Read) -> np.float32:
    """The largest global scale of the weights."""
    return np.float32(max(module.weight_scale_2(read) for module in modules))


def fp8_codes(module: Fp8Linear, read: Read, begin: int, end: int, common: np.float32) -> Array:
    """(rows, in) FP8 under the scale `common`, divided in float32 and rounded to nearest."""
    codes: Array = module.codes(read, begin, end)
    own = module.row_scales(read, 0, 1)[0]
    return codes if own == common else fp8.encode(fp8.decode(codes, own), common)


def fp4_block_scales(module: Fp4Linear, read: Read, begin: int, end: int, common: np.float32) -> Array:
    """(rows, in / 16) FP8 scales of the blocks under the global scale `common`."""
    scales: Array = module.block_scales(read, begin, end)
    own = module.weight_scale_2(read)
    if own == common:
        return scales
    moved = scales.astype(np.float32) * (own / common)
    clipped: Array = np.clip(moved, np.float32(nvfp4.SMALLEST_SCALE), np.float32(nvfp4.SCALE_MAX))
    return clipped.astype(scales.dtype)


def fp4_codes(module: Fp4Linear, read: Read, begin: int, end: int, common: np.float32) -> Array:
    """(rows, in / 2) bytes under the global scale `common` and its block scales, rounded to nearest."""
    codes: Array = module.codes(read, begin, end)
    own = module.weight_scale_2(read)
    if own == common:
        return codes
    values = nvfp4.decode(codes, module.block_scales(read, begin, end), own)
    return nvfp4.encode(values, fp4_block_scales(module, read, begin, end, common), common)


def group_scales(module: IntLinear, read: Read, begin: int, end: int, group_size: int) -> Array:
    """(rows, in / group_size) float32; the scale of a larger group is repeated."""
    scales = module.group_scales(read, begin, end)
    return np.repeat(scales, (module.group_size or module.shape[1]) // group_size, axis=1)
