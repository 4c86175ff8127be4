"""Arithmetic of stored quantized weights: unpacking, and values from codes and scales. Nothing is rounded here.

Sources of the layouts are named at each function; all of them are read row by row of the (out, in) matrix.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.errors import SourceError

if TYPE_CHECKING:
    from lpxbuild.source.records import TensorEntry

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

TYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype("?"),
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""Values of the 4-bit float, by code (OCP Microscaling Formats, 1.0, section 5.3.3)."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AutoAWQ word that holds each of its eight columns: column c lies in nibble AWQ_ORDER[c]."""


def mapped(tensors: Mapping[str, TensorEntry]) -> Callable[[str], Array]:
    """A reader of the files' tensors: arrays over mapped pages, which the kernel may drop at any time.

    A mapping lives as long as the arrays over it.

    Raises:
        SourceError: the file is gone, or shorter than when it was checked; by the reader.
    """

    def read(name: str) -> Array:
        entry = tensors[name]
        dtype = TYPES[entry.dtype]
        if entry.nbytes == 0:
            return np.empty(entry.shape, dtype)
        skip = entry.begin % mmap.ALLOCATIONGRANULARITY
        try:
            with entry.file.open("rb") as file:
                pages = mmap.mmap(file.fileno(), entry.nbytes + skip, prot=mmap.PROT_READ, offset=entry.begin - skip)
        except (OSError, ValueError) as error:  # ValueError: the file is shorter than that
            raise SourceError(
                f"tensor {name} of {entry.file} cannot be read: {error}",
                why="the file changed after the source was checked, or the address space is limited (ulimit -v)",
                next="restore the file, or raise the limit, and build again",
            ) from error
        count = entry.nbytes // dtype.itemsize
        return np.frombuffer(pages, dtype, count=count, offset=skip).reshape(entry.shape)

    return read


def to_float(values: Array) -> Float32:
    """float32 of any stored type, aligned."""
    return np.ascontiguousarray(values).astype(np.float32)


def unpack_words(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """(rows, words) of int32 → (rows, words · 32 / bits): the lowest bits come first."""
    count = 32 // bits
    bytes_ = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return bytes_.reshape(words.shape[0], -1)
    per_byte = 8 // bits
    parts = np.empty((*bytes_.shape, per_byte), np.uint8)
    for part in range(per_byte):
        parts[..., part] = bytes_ >> (part * bits) & ((1 << bits) - 1)
    return parts.reshape(words.shape[0], words.shape[1] * count)


def unpack_row_pairs(packed: Array, begin: int, end: int) -> npt.NDArray[np.int8]:
    """Rows begin … end of ModelOpt's int4 (out / 2, in): row 2i in the low nibble, 2i + 1 in the high one; signed."""
    first = begin // 2
    pairs = np.ascontiguousarray(packed[first : (end + 1) // 2]).view(np.int8)
    rows = np.empty((len(pairs) * 2, pairs.shape[1]), np.int8)
    rows[0::2] = pairs << 4 >> 4
    rows[1::2] = pairs >> 4
    return rows[begin - 2 * first : end - 2 * first]


def unpack_fp4(packed: Array) -> Float32:
    """(rows, in / 2) → (rows, in): the even column in the low nibble."""
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    return E2M1[codes]


def spread(scales: Float32, columns: int) -> Float32:
    """(rows, groups) → (rows, columns): each scale once for each column of its group; the last group may be short."""
    group = -(-columns // scales.shape[1])
    return np.repeat(scales, group, axis=1)[:, :columns]
