"""Element types of checkpoints, and casts between them that say when a number became infinite."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""safetensors' names → numpy dtypes, for the types that weights may have."""
STORED_TYPES: dict[str, np.dtype[Any]] = {
    **NUMPY_TYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
}
"""The same for everything that a checkpoint of lpx may hold."""


@dataclass(frozen=True)
class Overflow:
    """Finite numbers that the target type cannot hold: how many became infinite, and the largest magnitude."""

    count: int
    largest: float


def cast(source: Array, target: Array) -> Overflow | None:
    """`target[...] = source` with one rounding to nearest even; both of `NUMPY_TYPES`, of equal shape, contiguous.

    16-bit to 16-bit goes through a table of all 65,536 values, which is exact and faster than arithmetic.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if source.dtype.itemsize == 2 and target.dtype.itemsize == 2:
            table, threshold = _table(source.dtype.name, target.dtype.name)
            bits = source.view(np.uint16)
            np.take(table, bits, out=target.view(np.uint16), mode="clip")
            suspicious = threshold is not None and int((bits & 0x7FFF).max(initial=0)) >= threshold
        else:
            np.copyto(target, source, casting="unsafe")
            suspicious = target.dtype.itemsize == 2 and (
                int((target.view(np.uint16) & 0x7FFF).max(initial=0)) >= infinity_bits(target.dtype.name)
            )
        if not suspicious:
            return None
        values = source.astype(np.float32)
        lost = np.isinf(target.astype(np.float32)) & np.isfinite(values)
    count = int(lost.sum())
    return Overflow(count, float(np.abs(values[lost]).max())) if count else None


def _type(name: str) -> np.dtype[Any]:
    return next(dtype for dtype in NUMPY_TYPES.values() if dtype.name == name)


@cache
def infinity_bits(name: str) -> int:
    """The bits of infinity of a numpy dtype's name; those of NaN are larger, those of finite magnitudes smaller."""
    dtype = _type(name)
    return int(np.array(np.inf, np.float32).astype(dtype).view(f"u{dtype.itemsize}"))


@cache
def _table(source: str, target: str) -> tuple[npt.NDArray[np.uint16], int | None]:
    """Target bits of all source bits, and the smallest magnitude (as source bits) that may have overflowed."""
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(_type(source)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        table = values.astype(_type(target))
    lost = (np.isinf(table.astype(np.float32)) & np.isfinite(values))[: 1 << 15]
    return table.view(np.uint16), int(lost.argmax()) if lost.any() else None
