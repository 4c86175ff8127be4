"""Rows of a piece of a Hugging Face tensor, as numbers: the one place that knows how the files hold a matrix."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from lpxbuild.checkpoint.cast import NUMPY_TYPES, Array
from lpxbuild.checkpoint.layout import Piece
from lpxbuild.errors import HostError

if TYPE_CHECKING:
    from lpxbuild.checkpoint.transfer import Sources


def read_rows(sources: Sources, piece: Piece, begin: int, end: int) -> Array:
    """Rows `begin` to `end` of a piece, counted from its own first row: (rows, columns) in the source's dtype.

    A read-only view of the mapped file, contiguous where the piece has all columns of a matrix that the files hold as
    (out, in); a vector has one column. The mapping goes with the last view of it. Of a transposed matrix the view
    strides over the whole width of the piece, and nothing is held in memory.

    Raises:
        SourceError: the file is gone or became shorter.
        HostError: no address space to map the rows.
    """
    entry = sources.tensors[piece.source]
    dtype = NUMPY_TYPES[entry.dtype]
    rows, columns = (piece.rows[0] + begin, piece.rows[0] + end), piece.columns
    if piece.transposed:
        rows, columns = columns, rows
    width = entry.shape[-1] if len(entry.shape) > 1 else 1
    first = entry.begin + rows[0] * width * dtype.itemsize
    count = (rows[1] - rows[0]) * width
    data, skip = _mapped(sources.descriptor(entry.file), first, count * dtype.itemsize)
    block = np.frombuffer(data, dtype, count, skip).reshape(rows[1] - rows[0], width)[:, columns[0] : columns[1]]
    # Offsets of a safetensors file need not be aligned to the element.
    aligned = block if block.flags.aligned else block.copy()
    return aligned.T if piece.transposed else aligned


def _mapped(descriptor: int, begin: int, length: int) -> tuple[mmap.mmap, int]:
    skip = begin % mmap.ALLOCATIONGRANULARITY
    try:
        data = mmap.mmap(descriptor, length + skip, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=begin - skip)
    except OSError as error:
        raise HostError(
            f"{length} bytes of the source cannot be mapped: {error.strerror}",
            why="the address space of this process is limited (ulimit -v), or memory is exhausted",
            next="raise the limit, or build with fewer workers",
        ) from error
    return data, skip
