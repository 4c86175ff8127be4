"""Factors of a linear's input (AWQ, SmoothQuant): how a weight takes them up, and how fused weights come to share them.

A linear's input is multiplied by `pre_quant_scale`, its weight divided by it. Each step is rounded to the type of the
weight, as ModelOpt rewrites the weights in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def smooth(weight: Array, pre_quant_scale: Array) -> Array:
    """W · (1 / pre_quant_scale) in float32, rounded to the type of W.

    Args:
        weight: (out, in).
        pre_quant_scale: (in,), float32 where the calibration kept it so.
    """
    inverse = np.float32(1) / pre_quant_scale.astype(np.float32)
    smoothed: Array = np.multiply(weight, inverse, dtype=np.float32).astype(weight.dtype)
    return smoothed


def merged_scale(pre_quant_scales: Sequence[Array]) -> Array:
    """The mean of several linears' factors, added in float32 and rounded once to their type."""
    total = np.zeros(pre_quant_scales[0].shape, np.float32)
    for each in pre_quant_scales:
        total += each.astype(np.float32)
    mean: Array = (total / np.float32(len(pre_quant_scales))).astype(pre_quant_scales[0].dtype)
    return mean


def move(smoothed: Array, old: Array, new: Array) -> Array:
    """A smoothed weight with other factors: W' · old / new in float32, rounded to the type of W'."""
    ratio = np.multiply(smoothed, old.astype(np.float32), dtype=np.float32)
    moved: Array = np.divide(ratio, new.astype(np.float32), dtype=np.float32).astype(smoothed.dtype)
    return moved


def unsmooth(values: npt.NDArray[np.float32], pre_quant_scale: Array) -> npt.NDArray[np.float32]:
    """The effective weight of dequantized rows: W' · pre_quant_scale, float32."""
    return np.multiply(values, pre_quant_scale.astype(np.float32), dtype=np.float32)
