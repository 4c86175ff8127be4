"""How each format stores a linear layer in the unified layout: which tensors, and the bits of a block of rows.

Names, types and shapes are those of NVIDIA ModelOpt's `export_hf_checkpoint`; `out` and `in` are a linear's features:

    fp8           weight F8 (out, in), weight_scale, input_scale
    fp8_pc_pt     weight F8 (out, in), weight_scale (out)
    int8_sq       weight I8 (out, in), weight_scale (out), input_scale, pre_quant_scale (in)
    int4_awq      weight U8 (out / 2, in), weight_scale (out, in / group) [, pre_quant_scale (in)]
    w4a8_awq      as int4_awq, and weight_scale_2, input_scale
    nvfp4         weight U8 (out, in / 2), weight_scale F8 (out, in / 16), weight_scale_2, input_scale
    w4a16_nvfp4   as nvfp4 without input_scale

Scales without a shape are one number (F32); pre_quant_scale has the checkpoint's type. The weight of a Conv1D (GPT-2)
stays (in, out), as every loader of that family turns it around.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import Array
from lpxbuild.checkpoint.unified.modules import Module
from lpxbuild.checkpoint.unified.shards import StoredTensor
from lpxbuild.quantization import fp8, int4, int8, nvfp4

Encoded = dict[str, Array]
"""Suffix of a tensor's name → its rows."""


@dataclass(frozen=True)
class Encoding:
    """One format.

    Attributes:
        per_tensor: the largest magnitude of the whole weight is needed before its first row can be written.
        merged: modules of one group share that magnitude, and that of their input.
        input_scale: the scale of the input from its largest magnitude; None = the format stores none.
        row_multiple: rows that are encoded together.
    """

    per_tensor: bool = False
    merged: bool = True
    input_scale: Callable[[float], Any] | None = None
    row_multiple: int = 1


ENCODINGS = {
    "fp8": Encoding(per_tensor=True, merged=False, input_scale=fp8.scale),
    "fp8_pc_pt": Encoding(),
    "int8_sq": Encoding(input_scale=int8.scale),
    "int4_awq": Encoding(row_multiple=2),
    "w4a8_awq": Encoding(per_tensor=True, input_scale=fp8.scale, row_multiple=2),
    "nvfp4": Encoding(per_tensor=True, input_scale=nvfp4.global_scale),
    "w4a16_nvfp4": Encoding(per_tensor=True),
}


def stored(module: Module, name: str, group_size: int, dtype: str, *, factors: bool) -> list[StoredTensor]:
    """The tensors of a linear in a format; `factors`: whether pre_quant_scale is among them."""
    out, columns = module.shape
    shapes: dict[str, tuple[str, tuple[int, ...]]]
    if name in ("fp8", "fp8_pc_pt"):
        shapes = {"weight": ("F8_E4M3", (out, columns)), "weight_scale": ("F32", () if name == "fp8" else (out,))}
    elif name == "int8_sq":
        shapes = {"weight": ("I8", (out, columns)), "weight_scale": ("F32", (out,))}
    elif name in ("int4_awq", "w4a8_awq"):
        shapes = {"weight": ("U8", (out // 2, columns)), "weight_scale": ("F32", (out, columns // group_size))}
    else:
        shapes = {
            "weight": ("U8", (out, columns // 2)),
            "weight_scale": ("F8_E4M3", (out, columns // nvfp4.BLOCK)),
        }
    if name in ("w4a8_awq", "nvfp4", "w4a16_nvfp4"):
        shapes["weight_scale_2"] = ("F32", ())
    if ENCODINGS[name].input_scale is not None:
        shapes["input_scale"] = ("F32", ())
    if factors:
        shapes["pre_quant_scale"] = (dtype, (columns,))
    if module.transposed:
        kind, shape = shapes["weight"]
        shapes["weight"] = (kind, shape[::-1])
    return [StoredTensor(f"{module.name}.{suffix}", kind, shape) for suffix, (kind, shape) in shapes.items()]


def encoder(name: str, group_size: int, largest: float, dtype: np.dtype[np.generic]) -> Callable[[Array], Encoded]:
    """The function that encodes rows of one linear.

    Args:
        largest: magnitude of the whole weight, or of all that share it; used by formats that are `per_tensor`.
        dtype: of the rows that will be given.
    """
    if name == "fp8":
        return _per_tensor_fp8(fp8.scale(largest), dtype)
    if name == "fp8_pc_pt":
        return _row_fp8
    if name == "int8_sq":
        return _row_int8
    if name in ("int4_awq", "w4a8_awq"):
        return partial(_int4, group_size=group_size)
    return partial(_nvfp4, global_scale=nvfp4.global_scale(largest))


def scalars(name: str, largest: float, input_largest: float | None) -> dict[str, float]:
    """Scales of one number by their suffix."""
    found: dict[str, float] = {}
    if name == "fp8":
        found["weight_scale"] = float(fp8.scale(largest))
    elif name == "w4a8_awq":
        found["weight_scale_2"] = float(fp8.scale(largest))
    elif name in ("nvfp4", "w4a16_nvfp4"):
        found["weight_scale_2"] = float(nvfp4.global_scale(largest))
    scale = ENCODINGS[name].input_scale
    if scale is not None and input_largest is not None:
        found["input_scale"] = float(scale(input_largest))
    return found


def _per_tensor_fp8(scale: Array, dtype: np.dtype[np.generic]) -> Callable[[Array], Encoded]:
    """Divided in the weights' type and then rounded to FP8: torch divides by a tensor of one number so."""
    if dtype.itemsize == 2:
        table = fp8.encode(_quotients(_every(dtype), scale, dtype), 1.0)
        return lambda rows: {"weight": np.take(table, rows.view(np.uint16))}
    return lambda rows: {"weight": fp8.encode(rows, scale)}


def _every(dtype: np.dtype[np.generic]) -> Array:
    """All numbers of a 16-bit type, in the order of their bits."""
    return np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)


def _quotients(values: Array, scale: Array, dtype: np.dtype[np.generic]) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        quotients: Array = np.divide(values, scale, dtype=np.float32).astype(dtype)
    return quotients


def _row_fp8(rows: Array) -> Encoded:
    scales = fp8.row_scales(rows)
    return {"weight": fp8.encode(rows, scales[:, None]), "weight_scale": scales}


def _row_int8(rows: Array) -> Encoded:
    scales = int8.row_scales(rows)
    return {"weight": int8.encode(rows, scales), "weight_scale": scales}


def _int4(rows: Array, *, group_size: int) -> Encoded:
    scales = int4.block_scales(rows, group_size)
    packed = int4.pack_rows(int4.encode(rows, scales, group_size))
    return {"weight": packed.view(np.uint8), "weight_scale": scales}


def _nvfp4(rows: Array, *, global_scale: Array) -> Encoded:
    scales = nvfp4.block_scales(rows, global_scale)
    return {"weight": nvfp4.encode(rows, scales, global_scale), "weight_scale": scales}
