"""Largest magnitude and non-finite numbers of weights, in two passes over memory that the copy touches anyway."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import Array, infinity_bits


@dataclass(frozen=True)
class Extent:
    """Of some numbers: the largest magnitude among the finite ones (0 for none), and how many are NaN or infinite."""

    largest: float = 0.0
    non_finite: int = 0

    @staticmethod
    def joined(extents: Iterable[Extent]) -> Extent:
        """Of all the numbers together."""
        largest, count = 0.0, 0
        for extent in extents:
            largest, count = max(largest, extent.largest), count + extent.non_finite
        return Extent(largest, count)


def extent(values: Array) -> Extent:
    """Of one of `cast.NUMPY_TYPES`, any shape; memory for copies is only taken where something is not finite.

    The bits of a float without its sign grow with its magnitude. As unsigned numbers the negative ones are all above
    the positive ones, as signed numbers all below: two maxima give both magnitudes without a copy.
    """
    bits = values.reshape(-1).view(f"u{values.dtype.itemsize}")
    if not bits.size:
        return Extent()
    sign = 1 << (8 * values.dtype.itemsize - 1)
    above, below = int(bits.max()), int(bits.view(f"i{values.dtype.itemsize}").max())
    magnitude = max(above - sign if above >= sign else above, below)
    if magnitude < infinity_bits(values.dtype.name):
        return Extent(_value(magnitude, values.dtype))
    finite = np.isfinite(values)
    kept = values[finite].astype(np.float32)
    return Extent(float(np.abs(kept).max(initial=0.0)), int(values.size - finite.sum()))


def _value(magnitude: int, dtype: np.dtype[Any]) -> float:
    return float(np.array(magnitude, f"u{dtype.itemsize}").view(dtype).astype(np.float32))
