"""Moves blocks of mapped source tensors into preallocated rank files.

Only the rows a piece needs are mapped, and only while it is copied; anonymous memory is a few blocks per worker.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import NUMPY_TYPES, Overflow, cast
from lpxbuild.checkpoint.layout import Piece, RankTensor
from lpxbuild.checkpoint.pieces import read_rows
from lpxbuild.checkpoint.statistics import Extent, extent
from lpxbuild.errors import HostError, SourceError
from lpxbuild.source.records import TensorEntry

WRITE_BLOCK = 1 << 20
"""Bytes looked at and written by one call straight from the mapping: they stay in the processor's cache."""
COPY_BLOCK = 2 << 20
"""Bytes of the block through which casts and strided slices go."""
WORKER_BYTES = 12 * COPY_BLOCK
"""Anonymous memory that one worker may need: block, cast block, comparisons of the overflow check."""


class Stopped(Exception):
    """Another worker failed, or the user stopped the run."""


class Sources:
    """The source files, opened once each; safe for several threads."""

    def __init__(self, tensors: Mapping[str, TensorEntry]) -> None:
        self.tensors = tensors
        self._descriptors: dict[Path, int] = {}
        self._lock = Lock()
        self._ends: dict[Path, int] = {}
        for entry in tensors.values():
            self._ends[entry.file] = max(entry.end, self._ends.get(entry.file, 0))

    def descriptor(self, path: Path) -> int:
        """An open file.

        Raises:
            SourceError: the file is gone, or shorter than when it was checked (mapping it would kill the process).
        """
        with self._lock:
            if path not in self._descriptors:
                try:
                    descriptor = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise SourceError(
                        f"{path} cannot be read: {error.strerror}",
                        why="it was there when the source was checked",
                        next="restore the file and build again",
                    ) from error
                self._descriptors[path] = descriptor
                size = os.fstat(descriptor).st_size
                if size < self._ends[path]:
                    raise SourceError(
                        f"{path} has {size} bytes, {self._ends[path]} are needed",
                        why="the file became shorter after the source was checked",
                        next="restore the file and build again",
                    )
            return self._descriptors[path]

    def close(self) -> None:
        """Close all files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


def transfer(
    tensor: RankTensor,
    sources: Sources,
    target: int,
    offset: int,
    target_dtype: str,
    advance: Callable[[int], None],
    stop: Event,
) -> tuple[Overflow | None, dict[Piece, Extent]]:
    """Write one rank tensor at `offset` of the open file `target`; rows without a piece stay as they are (zero).

    Args:
        target_dtype: safetensors' name of the checkpoint's element type.
        advance: told the bytes written.
        stop: ends the work between two blocks.

    Returns:
        what the cast lost, and the extent of every piece's source values.

    Raises:
        OSError: writing failed.
    """
    target_dtype = tensor.dtype or target_dtype
    row_bytes = (tensor.shape[-1] if len(tensor.shape) > 1 else 1) * NUMPY_TYPES[target_dtype].itemsize
    overflows: list[Overflow] = []
    extents: dict[Piece, Extent] = {}
    for piece in tensor.pieces:
        entry = sources.tensors[piece.source]
        at = offset + piece.at * row_bytes
        blocks: list[Extent] = []
        if piece.transposed or tensor.plus_one:
            overflows += _transfer_numbers(
                piece, sources, target, at, target_dtype, tensor.plus_one, blocks, advance, stop
            )
        else:
            overflows += _transfer_piece(
                piece, entry, sources.descriptor(entry.file), target, at, target_dtype, blocks, advance, stop
            )
        extents[piece] = Extent.joined(blocks)
    if not overflows:
        return None, extents
    return Overflow(sum(found.count for found in overflows), max(found.largest for found in overflows)), extents


def _transfer_numbers(
    piece: Piece,
    sources: Sources,
    target: int,
    at: int,
    target_dtype: str,
    plus_one: bool,
    extents: list[Extent],
    advance: Callable[[int], None],
    stop: Event,
) -> list[Overflow]:
    """Pieces that are not copied as they lie: matrices that the files hold as (in, out), and norms plus one."""
    rows, columns = piece.rows[1] - piece.rows[0], piece.columns[1] - piece.columns[0]
    step = max(1, COPY_BLOCK // (columns * 4))
    overflows = []
    for begin in range(0, rows, step):
        values = np.ascontiguousarray(read_rows(sources, piece, begin, min(begin + step, rows)))
        extents.append(extent(values))
        if plus_one:
            values = values.astype(np.float32) + np.float32(1)
        stored = np.empty(values.shape, NUMPY_TYPES[target_dtype])
        if values.dtype == stored.dtype:
            stored = values
        elif (found := cast(values, stored)) is not None:
            overflows.append(found)
        _write_blocks(stored.reshape(-1).view(np.uint8).data, target, at, advance, stop)
        at += stored.nbytes
    return overflows


def _transfer_piece(
    piece: Piece,
    entry: TensorEntry,
    source: int,
    target: int,
    at: int,
    target_dtype: str,
    extents: list[Extent],
    advance: Callable[[int], None],
    stop: Event,
) -> list[Overflow]:
    source_type, target_type = NUMPY_TYPES[entry.dtype], NUMPY_TYPES[target_dtype]
    width = entry.shape[1] if len(entry.shape) == 2 else 1
    rows, columns = piece.rows[1] - piece.rows[0], piece.columns[1] - piece.columns[0]
    begin = entry.begin + piece.rows[0] * width * source_type.itemsize
    with _Window(source, begin, rows * width * source_type.itemsize) as view:
        if columns == width and entry.dtype == target_dtype:
            _copy_straight(view, source_type, target, at, extents, advance, stop)
            return []
        # Offsets of a safetensors file need not be aligned to the element, so rows are cut as bytes.
        matrix = np.frombuffer(view, np.uint8).reshape(rows, width * source_type.itemsize)
        first, last = piece.columns[0] * source_type.itemsize, piece.columns[1] * source_type.itemsize
        step = max(1, COPY_BLOCK // (columns * 4))
        try:
            return _copy_rows(matrix[:, first:last], step, source_type, target_type, target, at, extents, advance, stop)
        finally:
            del matrix


def _copy_straight(
    view: memoryview,
    dtype: np.dtype[Any],
    target: int,
    at: int,
    extents: list[Extent],
    advance: Callable[[int], None],
    stop: Event,
) -> None:
    for begin in range(0, len(view), WRITE_BLOCK):
        block = view[begin : begin + WRITE_BLOCK]
        extents.append(extent(np.frombuffer(block, dtype)))
        _write_blocks(block, target, at + begin, advance, stop)


def _copy_rows(
    matrix: np.ndarray[Any, np.dtype[np.uint8]],
    step: int,
    source_type: np.dtype[Any],
    target_type: np.dtype[Any],
    target: int,
    at: int,
    extents: list[Extent],
    advance: Callable[[int], None],
    stop: Event,
) -> list[Overflow]:
    """Blocks of `step` rows: made contiguous, cast where the types differ, written."""
    rows, row_bytes = matrix.shape
    columns = row_bytes // source_type.itemsize
    step = min(step, rows)
    block = np.empty((step, row_bytes), np.uint8)
    cast_block = block if source_type == target_type else np.empty((step, columns * target_type.itemsize), np.uint8)
    overflows = []
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        np.copyto(block[:count], matrix[begin : begin + count])
        values = block[:count].reshape(-1).view(source_type)
        extents.append(extent(values))
        if cast_block is not block:
            found = cast(values, cast_block[:count].reshape(-1).view(target_type))
            if found is not None:
                overflows.append(found)
        _write_blocks(cast_block[:count].reshape(-1).data, target, at, advance, stop)
        at += count * columns * target_type.itemsize
    return overflows


def _write_blocks(data: memoryview, target: int, at: int, advance: Callable[[int], None], stop: Event) -> None:
    position = 0
    while position < len(data):
        if stop.is_set():
            raise Stopped
        written = os.pwrite(target, data[position : position + WRITE_BLOCK], at + position)
        position += written
        advance(written)


class _Window:
    """A read-only view of a byte range of a file, mapped while the block runs."""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self._skip = begin % mmap.ALLOCATIONGRANULARITY
        try:
            self._map = mmap.mmap(
                descriptor, length + self._skip, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=begin - self._skip
            )
        except OSError as error:
            raise HostError(
                f"{length} bytes of the source cannot be mapped: {error.strerror}",
                why="the address space of this process is limited (ulimit -v), or memory is exhausted",
                next="raise the limit, or build with fewer workers",
            ) from error

    def __enter__(self) -> memoryview:
        self._view = memoryview(self._map)[self._skip :]
        return self._view

    def __exit__(self, *_: object) -> None:
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            # After an error the traceback still holds arrays over the mapping; it goes with them.
            return
