"""Rows of the matrix that a quantized linear stands for, from what the checkpoint stores of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lpxbuild.checkpoint.cast import Array
from lpxbuild.checkpoint.quantized_layout import FACTORS, INT4, NVFP4, ROW_SCALE, SCALE, SCALE_2, SMOOTHED, WEIGHT
from lpxbuild.quantization import awq, fp8, int4, int8, nvfp4

Float32 = npt.NDArray[np.float32]


def decoded_rows(
    name: str, shape: tuple[int, ...], group: int, stored: Callable[[str], Array], begin: int, end: int
) -> Float32:
    """Rows begin … end, counted through all experts: (rows, in) float32.

    Args:
        name: the format, one that does not store plain weights.
        shape: (out, in) or (experts, out, in) of the matrix.
        group: input features of a group of the int4 formats.
        stored: gives a stored tensor by its suffix.
    """
    out, columns = shape[-2], shape[-1]
    experts = np.arange(begin, end) // out
    if name in INT4:
        rows = _int4(stored, columns, group, begin, end)
    elif name in NVFP4:
        scales = _rows(stored(SCALE), begin, end).astype(np.float32)
        rows = nvfp4.decode(_rows(stored(WEIGHT), begin, end), scales * _each(stored(SCALE_2), experts)[:, None], 1.0)
    elif name == "int8_sq":
        rows = int8.decode(_rows(stored(WEIGHT), begin, end), stored(SCALE).reshape(-1)[begin:end])
    else:
        by_row = stored(ROW_SCALE).reshape(-1)[begin:end] if name == "fp8_pc_pt" else _each(stored(SCALE), experts)
        rows = fp8.decode(_rows(stored(WEIGHT), begin, end), by_row[:, None])
    if name in SMOOTHED:
        factors = stored(FACTORS)
        rows = awq.unsmooth(rows, factors if factors.ndim == 1 else factors[experts])
    return rows


def _int4(stored: Callable[[str], Array], columns: int, group: int, begin: int, end: int) -> Float32:
    first = begin // 2
    packed = _rows(stored(WEIGHT), first, (end + 1) // 2)
    codes = int4.unpack_rows(packed)[begin - 2 * first : end - 2 * first]
    return int4.decode(codes, _rows(stored(SCALE), begin, end), group)


def _rows(values: Array, begin: int, end: int) -> Array:
    return values.reshape(-1, values.shape[-1])[begin:end]


def _each(scales: Array, experts: npt.NDArray[np.int64]) -> Float32:
    """The scale of each row: one for all, or one for each expert."""
    numbers = scales.reshape(-1)
    each: Float32 = numbers[experts] if numbers.size > 1 else np.full(len(experts), numbers[0], np.float32)
    return each
