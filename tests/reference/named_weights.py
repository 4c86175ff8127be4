"""Weights that follow from their names alone, the same for every interpreter and library version that has numpy."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt


def bfloat16_bits(name: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint16]:
    """Bits of bfloat16 numbers: bell-shaped around 0 for matrices and biases, around 1 for weights of norms.

    Whole numbers of PCG64 are added up, so that no rounding of a library takes part.
    """
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    total = sum(generator.integers(-(1 << 15), 1 << 15, shape, dtype=np.int64) for _ in range(6))
    spread, centre = (0.08, 0.0) if len(shape) > 1 or name.endswith("bias") else (0.4, 1.0)
    values = centre + total.astype(np.float64) / (1 << 15) / 1.41421356 * spread
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
