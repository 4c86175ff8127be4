"""The work on one part of a checkpoint: a tensor that is only cast, a norm that takes factors over, a group of linears.

Rows are read in blocks from the mapped source; formats with a scale for the whole weight go over it twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from threading import Event
from typing import Any

import numpy as np

from lpxbuild.checkpoint.cast import NUMPY_TYPES, Array, Overflow, cast
from lpxbuild.checkpoint.layout import Piece, RankTensor
from lpxbuild.checkpoint.pieces import read_rows
from lpxbuild.checkpoint.statistics import Extent, extent
from lpxbuild.checkpoint.transfer import COPY_BLOCK, Sources, Stopped, transfer
from lpxbuild.checkpoint.unified.encoding import ENCODINGS, encoder, scalars
from lpxbuild.checkpoint.unified.modules import Group, Module, Norm
from lpxbuild.checkpoint.unified.shards import Shard, StoredTensor
from lpxbuild.checkpoint.unified.smoothing import Smoothing, fold
from lpxbuild.quantization.calibrated import Calibration

ROW_BLOCK = COPY_BLOCK // 4
"""Elements of a block of rows: with its float32 forms it takes about what a copied block does."""


@dataclass
class Place:
    """Where the tensors lie: the open files, and what the writing found out. Safe for several threads."""

    shards: Mapping[str, tuple[Shard, int]]
    stored: Mapping[str, StoredTensor]
    sources: Sources
    dtype: str
    stop: Event
    advance: Callable[[int], None]
    overflows: dict[str, Overflow] = field(default_factory=dict)
    extents: dict[str, Extent] = field(default_factory=dict)

    def put(self, name: str, rows: Array, at: int = 0) -> None:
        """Write rows of a tensor, beginning with its row `at`."""
        shard, descriptor = self.shards[name]
        tensor = self.stored[name]
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        position, end = shard.offsets[name] + at * tensor.row_bytes, len(data)
        written = 0
        while written < end:
            if self.stop.is_set():
                raise Stopped
            written += os.pwrite(descriptor, data[written:], position + written)
        self.advance(end)

    def number(self, name: str, value: float) -> None:
        """Write a scale of one number."""
        self.put(name, np.array([value], np.float32))

    def rows(self, module: Module, begin: int, end: int, *, first: bool) -> Array:
        """Rows of a linear's weight in the checkpoint's type; `first`: nobody has read them before."""
        block = np.ascontiguousarray(read_rows(self.sources, module.piece, begin, end))
        if first:
            self.see(module.piece.source, extent(block))
        return self._typed(module.piece.source, block, first=first)

    def see(self, name: str, found: Extent) -> None:
        """Remember the extent of a part of a tensor of the source."""
        self.extents[name] = Extent.joined((self.extents.get(name, Extent()), found))

    def vector(self, name: str) -> Array:
        """A whole vector in the checkpoint's type."""
        entry = self.sources.tensors[name]
        values = np.ascontiguousarray(
            read_rows(self.sources, Piece(name, (0, entry.shape[0]), (0, 1), 0), 0, entry.shape[0])
        )
        self.see(name, extent(values))
        return self._typed(name, values, first=True).reshape(-1)

    def copy(self, name: str) -> None:
        """Write a tensor as it is, cast to the checkpoint's type."""
        tensor = self.stored[name]
        shape = tensor.shape if len(tensor.shape) > 1 else (*tensor.shape, 1)
        shard, descriptor = self.shards[name]
        planned = RankTensor(0, name, tensor.shape, (Piece(name, (0, shape[0]), (0, prod(shape[1:])), 0),))
        overflow, seen = transfer(
            planned, self.sources, descriptor, shard.offsets[name], self.dtype, self.advance, self.stop
        )
        self.see(name, Extent.joined(seen.values()))
        if overflow is not None:
            self.overflows[name] = overflow

    def _typed(self, name: str, block: Array, *, first: bool) -> Array:
        target = NUMPY_TYPES[self.dtype]
        if block.dtype == target:
            return block
        typed = np.empty(block.shape, target)
        lost = cast(block.reshape(-1), typed.reshape(-1))
        if lost is not None and first:
            before = self.overflows.get(name, Overflow(0, 0.0))
            self.overflows[name] = Overflow(before.count + lost.count, max(before.largest, lost.largest))
        return typed


@dataclass(frozen=True)
class GroupWork:
    """The linears of one group in one format."""

    group: Group
    format: str
    group_size: int
    smoothing: Mapping[str, Smoothing]
    input_largest: Mapping[str, float]

    def __call__(self, place: Place) -> None:
        """Write all tensors of the group."""
        encoding = ENCODINGS[self.format]
        largest = {module.name: 0.0 for module in self.group.modules}
        if encoding.per_tensor:
            for module in self.group.modules:
                largest[module.name] = max(extent(rows).largest for _, rows in self._blocks(place, module, first=True))
            # Loaders run the two halves of an expert with one scale, and would round FP8 weights a second time.
            if encoding.merged or self.group.experts is not None:
                largest = dict.fromkeys(largest, max(largest.values()))
        for module in self.group.modules:
            self._write(place, module, largest[module.name])

    def _write(self, place: Place, module: Module, largest: float) -> None:
        for suffix, value in scalars(self.format, largest, self.input_largest.get(module.name)).items():
            place.number(f"{module.name}.{suffix}", value)
        smoothing = self.smoothing.get(module.name)
        if smoothing is not None and smoothing.stored:
            place.put(f"{module.name}.pre_quant_scale", smoothing.factors)
        encode = encoder(self.format, self.group_size, largest, NUMPY_TYPES[place.dtype])
        for begin, rows in self._blocks(place, module, first=not ENCODINGS[self.format].per_tensor):
            for suffix, encoded in encode(rows).items():
                name = f"{module.name}.{suffix}"
                if suffix == "weight" and module.transposed:
                    place.put(name, encoded.T)
                else:
                    place.put(name, encoded, begin * len(encoded) // len(rows))

    def _blocks(self, place: Place, module: Module, *, first: bool) -> Iterator[tuple[int, Array]]:
        """(number of the first row, rows) of the weight, smoothed where the format smooths."""
        rows, columns = module.shape
        multiple = ENCODINGS[self.format].row_multiple
        # A transposed weight is written column by column, so it goes in one block (GPT-2: 10 million elements).
        step = rows if module.transposed else max(multiple, ROW_BLOCK // columns // multiple * multiple)
        smoothing = self.smoothing.get(module.name)
        for begin in range(0, rows, step):
            block = place.rows(module, begin, min(begin + step, rows), first=first)
            yield begin, block if smoothing is None else smoothing.smooth(block)


@dataclass(frozen=True)
class FoldWork:
    """The tensors of a norm that takes over the factors of the group behind it."""

    norm: Norm
    factors: Array

    def __call__(self, place: Place) -> None:
        """Write weight and bias."""
        for name in self.norm.tensors:
            place.put(name, fold(self.norm, name, place.vector(name), self.factors))


@dataclass(frozen=True)
class CopyWork:
    """A tensor that no format touches."""

    name: str

    def __call__(self, place: Place) -> None:
        """Write it."""
        place.copy(self.name)


Work = Callable[[Place], None]


def input_largest(
    group: Group, format: str, calibration: Calibration, experts: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    """Module → largest magnitude of its input, where the format stores it; one number for a merged group.

    An expert that no text of the calibration reached takes the largest of the other experts.
    """
    encoding = ENCODINGS[format]
    if encoding.input_scale is None:
        return {}
    found = {module.name: _amax(calibration, module.name, experts.get(module.name, ())) for module in group.modules}
    return dict.fromkeys(found, max(found.values())) if encoding.merged else found


def _amax(calibration: Calibration, module: str, siblings: tuple[str, ...]) -> float:
    own = _known(calibration, module)
    if own is not None:
        return own
    others = [value for name in siblings if (value := _known(calibration, name)) is not None]
    return max(others) if others else calibration.input_amax(module)


def _known(calibration: Calibration, module: str) -> float | None:
    if not calibration.has(f"{module}.input_quantizer._amax"):
        return None
    value: Any = calibration.input_amax(module)
    return value if value > 0 else None
