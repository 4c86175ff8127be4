"""From rows of a whole linear to what each format stores of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import Array
from lpxbuild.checkpoint.quantized_layout import INT4, NVFP4, ROW_SCALE, SCALE, SCALE_2, WEIGHT
from lpxbuild.quantization import fp8, int4, int8, nvfp4

Encode = Callable[[Array], Mapping[str, Array]]
"""Rows (rows, in) in the source's type → suffix → their part of the stored tensor."""


@dataclass(frozen=True)
class Codec:
    """How a format goes about a linear.

    Attributes:
        per_tensor: a scale needs the largest magnitude of the whole weight, before the first row is written.
        gated: that scale, and the input's, are shared by mlp.fc and mlp.gate, which TensorRT-LLM runs as one.
        input_scale: activation_scaling_factor from the largest magnitude of the input; None = there is none.
        divisors: suffix → (rows, columns) of the weight that share one row or column of what is stored; columns 0 =
            one number for each row.
    """

    per_tensor: bool
    gated: bool
    input_scale: Callable[[Any], Any] | None
    divisors: Mapping[str, tuple[int, int]]


def codec(name: str, group: int) -> Codec:
    """The codec of a format that does not store plain weights."""
    if name == "fp8":
        return Codec(True, True, fp8.scale, {WEIGHT: (1, 1)})
    if name == "fp8_pc_pt":
        return Codec(False, False, None, {WEIGHT: (1, 1), ROW_SCALE: (1, 0)})
    if name == "int8_sq":
        return Codec(False, False, int8.scale, {WEIGHT: (1, 1), SCALE: (1, 0)})
    if name in INT4:
        w4a8 = name == "w4a8_awq"
        return Codec(w4a8, False, fp8.scale if w4a8 else None, {WEIGHT: (2, 1), SCALE: (1, group)})
    gated = name == "nvfp4"
    input_scale = nvfp4.global_scale if gated else None
    return Codec(True, gated, input_scale, {WEIGHT: (1, 2), SCALE: (1, nvfp4.BLOCK)})


def weight_scales(name: str, largest: Array) -> Mapping[str, Array]:
    """The stored scales of whole weights by suffix, from their largest magnitudes (one, or one for each expert)."""
    if name == "fp8":
        return {SCALE: fp8.scale(largest)}
    if name == "w4a8_awq":
        return {SCALE_2: fp8.scale(largest)}
    return {SCALE_2: nvfp4.global_scale(largest)} if name in NVFP4 else {}


def encoder(name: str, group: int, largest: float, dtype: np.dtype[Any]) -> Encode:
    """The function that encodes rows.

    Args:
        largest: magnitude of everything that shares the scale of the whole weight; used where the codec says so.
        dtype: type of the rows.
    """
    if name == "fp8":
        return _per_tensor_fp8(fp8.scale(largest), dtype)
    if name == "fp8_pc_pt":
        return _row_fp8
    if name == "int8_sq":
        return _row_int8
    if name in INT4:
        return lambda rows: _int4(rows, group)
    scale = nvfp4.global_scale(largest)
    return lambda rows: _nvfp4(rows, scale)


def _per_tensor_fp8(scale: Any, dtype: np.dtype[Any]) -> Encode:
    if dtype.itemsize != 2:
        return lambda rows: {WEIGHT: fp8.encode(rows, scale)}
    table = fp8.encode_table(dtype, scale)
    return lambda rows: {WEIGHT: np.take(table, rows.view(np.uint16))}


def _row_fp8(rows: Array) -> Mapping[str, Array]:
    scales = fp8.row_scales(rows)
    return {WEIGHT: fp8.encode(rows, scales[:, None]), ROW_SCALE: scales}


def _row_int8(rows: Array) -> Mapping[str, Array]:
    scales = int8.row_scales(rows)
    return {WEIGHT: int8.encode(rows, scales), SCALE: scales}


def _int4(rows: Array, group: int) -> Mapping[str, Array]:
    scales = int4.block_scales(rows, group)
    return {WEIGHT: int4.pack_rows(int4.encode(rows, scales, group)), SCALE: scales}


def _nvfp4(rows: Array, scale: Any) -> Mapping[str, Array]:
    blocks = nvfp4.block_scales(rows, scale)
    return {WEIGHT: nvfp4.encode(rows, blocks, scale), SCALE: blocks}
