"""FP8 (E4M3, no infinities): scales and bits of weights, per tensor and per output channel.

A number and its scale are divided in float32 and rounded once to the nearest FP8 value, ties to even. Larger magnitudes
than 448, infinity among them, become 448, as in torch 2.13.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.quantization.halves import by_upper_half, index
from lpxbuild.quantization.magnitude import largest

Array = npt.NDArray[Any]

MAX = 448.0
DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)


def scale(amax: Any) -> Any:
    """amax / 448 in float32, one number or an array; 1 where amax is 0, so that zeros stay zeros.

    Args:
        amax: largest magnitudes, of any float type.
    """
    scales = np.asarray(amax, np.float32) / np.float32(MAX)
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)


def row_scales(weight: Array) -> Array:
    """(out,) scales of the rows of a matrix (or of a stack of them)."""
    scales: Array = scale(largest(weight))
    return scales


def encode(values: Array, scales: Any) -> Array:
    """Values / scales as FP8.

    Args:
        values: any float type.
        scales: float32, broadcast against `values`.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        quotient = np.divide(values, np.asarray(scales, np.float32), dtype=np.float32)
    return np.take(_CODES, index(quotient)).view(DTYPE)


def encode_table(dtype: Any, scale: Any) -> npt.NDArray[np.uint8]:
    """FP8 bits of all 65,536 values of a 16-bit float type under one scale; index with the value's bits.

    `np.take(table, values.view(np.uint16))` gives what `encode` gives, several times faster.
    """
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)
    return encode(values, scale).view(np.uint8)


def decode(encoded: Array, scales: Any) -> npt.NDArray[np.float32]:
    """FP8 values · scales in float32; a table of 256 values is looked up, which is exact."""
    return np.multiply(_VALUES[encoded.view(np.uint8)], np.asarray(scales, np.float32))


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    with np.errstate(invalid="ignore", over="ignore"):
        return np.clip(values, -MAX, MAX).astype(DTYPE).view(np.uint8)


# The halfway points between two FP8 numbers have at most five significant bits.
_CODES = by_upper_half(_rounded)
_VALUES = np.arange(256, dtype=np.uint16).astype(np.uint8).view(DTYPE).astype(np.float32)
