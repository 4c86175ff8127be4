"""Largest magnitudes of weights, from their bits: those of a float without its sign grow with its magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FEW = 32
"""Up to this many numbers in a block, a maximum over each position is faster than one over each block."""


def largest(values: Array) -> npt.NDArray[np.float32]:
    """The largest magnitude along the last axis, float32, exactly; NaN where there is one."""
    size = values.dtype.itemsize
    bits = values.view(f"u{size}") & np.array((1 << (8 * size - 1)) - 1, f"u{size}")
    if bits.shape[-1] <= FEW:
        found = bits[..., 0].copy()
        for position in range(1, bits.shape[-1]):
            np.maximum(found, bits[..., position], out=found)
    else:
        found = bits.max(axis=-1)
    magnitudes: npt.NDArray[np.float32] = found.view(values.dtype).astype(np.float32)
    return magnitudes
