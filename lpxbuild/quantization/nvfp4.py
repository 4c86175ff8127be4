"""NVFP4: E2M1 numbers in blocks of 16 input features, an FP8 scale for each block, a float32 scale for all blocks.

W ≈ e2m1 · block_scale · global_scale. Two numbers share a byte: the even column in the low half.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.quantization.halves import by_upper_half, index
from lpxbuild.quantization.magnitude import largest

Array = npt.NDArray[Any]

BLOCK = 16
MAX = 6.0
SCALE_DTYPE: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
SCALE_MAX = 448.0
SMALLEST_SCALE = 2.0**-9
"""The smallest FP8 number above zero: a block scale is never zero."""

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""What the 16 codes stand for."""


def global_scale(amax: Any) -> Any:
    """amax / (6 · 448) in float32, of a weight or of an input; 1 where amax is 0."""
    scales = np.asarray(amax, np.float32) / np.float32(MAX * SCALE_MAX)
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)


def block_scales(weight: Array, global_scales: Any) -> Array:
    """(out, in / 16) FP8 scales: blockmax / (6 · global scale), between 2^-9 and 448; 1 for a block of zeros.

    Args:
        weight: (…, out, in), any float type.
        global_scales: float32, one number, or one for each matrix of a stack.
    """
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    scales = largest(blocks) / (np.float32(MAX) * _per_matrix(global_scales))
    scales[scales == 0] = 1
    bounded: Array = np.clip(scales, np.float32(SMALLEST_SCALE), np.float32(SCALE_MAX)).astype(SCALE_DTYPE)
    return bounded


def encode(weight: Array, scales: Array, global_scales: Any) -> npt.NDArray[np.uint8]:
    """(out, in / 2) bytes: W / (block scale · global scale) in float32, to the nearest E2M1, ties to even.

    Magnitudes above 6 become 6; a zero has no sign.
    """
    blocks = weight.reshape(*weight.shape[:-1], -1, BLOCK)
    divisor = scales.astype(np.float32) * _per_matrix(global_scales)
    quotient = np.divide(blocks, divisor[..., None], dtype=np.float32).reshape(weight.shape)
    pairs = np.take(_CODES, index(quotient)).view("<u2")
    packed: npt.NDArray[np.uint8] = ((pairs >> np.uint16(4)) | pairs).astype(np.uint8)
    return packed


def decode(packed: Array, scales: Array, global_scales: Any) -> npt.NDArray[np.float32]:
    """The way back: (out, in) float32."""
    bits = packed.view(np.uint8)
    values = np.empty((*bits.shape[:-1], bits.shape[-1] * 2), np.float32)
    values[..., 0::2] = VALUES[bits & np.uint8(0x0F)]
    values[..., 1::2] = VALUES[bits >> np.uint8(4)]
    factor = scales.astype(np.float32) * _per_matrix(global_scales)
    blocks = values.reshape(*values.shape[:-1], -1, BLOCK)
    blocks *= factor[..., None]
    return values


def _per_matrix(global_scales: Any) -> Any:
    scales = np.asarray(global_scales, np.float32)
    return scales.reshape(-1, 1, 1) if scales.size > 1 else scales.reshape(())


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    magnitude = np.abs(values)
    codes = np.zeros(values.shape, np.uint8)
    with np.errstate(invalid="ignore"):
        # At a limit the even code wins: from below for 0.25, 1.25, 2.5 and 5, from above for 0.75, 1.75 and 3.5.
        for limit in (0.25, 1.25, 2.5, 5.0):
            codes += magnitude > limit
        for limit in (0.75, 1.75, 3.5):
            codes += magnitude >= limit
        codes |= (values < 0).astype(np.uint8) << np.uint8(3)
    return codes


_CODES = by_upper_half(_rounded)
