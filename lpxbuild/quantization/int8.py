"""INT8 with a scale for each output channel: q = W / (rowmax / 127), rounded half to even."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lpxbuild.quantization.magnitude import largest

Array = npt.NDArray[Any]

MAX = 127.0


def scale(amax: Any) -> Any:
    """amax / 127 in float32, one number or an array; 1 where amax is 0."""
    scales = np.asarray(amax, np.float32) / np.float32(MAX)
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)


def row_scales(weight: Array) -> Array:
    """(out,) scales of the rows of a matrix."""
    scales: Array = scale(largest(weight))
    return scales


def encode(weight: Array, scales: Array) -> npt.NDArray[np.int8]:
    """(out, in) int8 in -128..127; the division is float32.

    Args:
        weight: (out, in), any float type.
        scales: (out,) float32.
    """
    quotient = np.divide(weight, scales[..., None], dtype=np.float32)
    np.rint(quotient, out=quotient)
    np.clip(quotient, -128, 127, out=quotient)
    return quotient.astype(np.int8)


def decode(encoded: Array, scales: Array) -> npt.NDArray[np.float32]:
    """The way back: (out, in) float32."""
    return np.multiply(encoded, scales[..., None], dtype=np.float32)
