"""INT4 in groups of input features, and how two output rows share a byte.

TensorRT-LLM's checkpoints hold (out / 2, in) bytes: byte [j, i] has q[2j, i] in its low half and q[2j + 1, i] in its
high half, both as two's complement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lpxbuild.quantization.magnitude import largest

Array = npt.NDArray[Any]

MAX = 7.0


def block_scales(weight: Array, group_size: int) -> npt.NDArray[np.float32]:
    """(out, in / group_size) scales: the largest magnitude of each group / 7; 1 for a group of zeros.

    Args:
        weight: (out, in), any float type; `in` is a multiple of `group_size`.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    scales = largest(groups) / np.float32(MAX)
    return np.where(scales == 0, np.float32(1), scales).astype(np.float32)


def encode(weight: Array, scales: Array, group_size: int) -> npt.NDArray[np.int8]:
    """(out, in) int8 in -8..7: W / scale in float32, rounded half to even."""
    groups = weight.reshape(*weight.shape[:-1], -1, group_size)
    quotient = np.divide(groups, scales[..., None], dtype=np.float32)
    np.rint(quotient, out=quotient)
    np.clip(quotient, -8, 7, out=quotient)
    return quotient.astype(np.int8).reshape(weight.shape)


def pack_rows(quantized: Array) -> npt.NDArray[np.int8]:
    """(out, in) → (out / 2, in): even rows in the low halves of the bytes."""
    bits = quantized.view(np.uint8)
    packed = bits[..., 1::2, :] << np.uint8(4)
    packed |= bits[..., 0::2, :] & np.uint8(0x0F)
    return packed.view(np.int8)


def unpack_rows(packed: Array) -> npt.NDArray[np.int8]:
    """The way back from `pack_rows`: (out, in) int8 in -8..7."""
    bits = packed.view(np.uint8)
    rows = np.empty((*bits.shape[:-2], bits.shape[-2] * 2, bits.shape[-1]), np.int8)
    rows[..., 0::2, :] = (bits << np.uint8(4)).view(np.int8) >> np.int8(4)
    rows[..., 1::2, :] = bits.view(np.int8) >> np.int8(4)
    return rows


def decode(quantized: Array, scales: Array, group_size: int) -> npt.NDArray[np.float32]:
    """(out, in) float32 of unpacked numbers."""
    groups = quantized.reshape(*quantized.shape[:-1], -1, group_size)
    return np.multiply(groups, scales[..., None], dtype=np.float32).reshape(quantized.shape)
