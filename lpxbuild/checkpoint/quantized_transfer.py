"""Quantizes whole linears into the rank files, block by block of rows, all ranks from one reading.

Scales are found over the whole parts of a linear, before it is split. A format with a scale for the whole weight goes
over it twice; anonymous memory is a few blocks for each worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Event

import numpy as np

from lpxbuild.checkpoint.cast import NUMPY_TYPES, Array
from lpxbuild.checkpoint.layout import Linear, LinearPart, Piece
from lpxbuild.checkpoint.pieces import read_rows
from lpxbuild.checkpoint.quantized_codecs import Codec, codec, encoder, weight_scales
from lpxbuild.checkpoint.quantized_layout import CACHE_SCALES, FACTORS, INPUT_SCALE, SMOOTHED, StoredTensor
from lpxbuild.checkpoint.rank_file import RankFile
from lpxbuild.checkpoint.report import OverflowedTensor
from lpxbuild.checkpoint.statistics import Extent, extent
from lpxbuild.checkpoint.transfer import Sources, Stopped
from lpxbuild.quantization import awq
from lpxbuild.quantization.calibrated import Calibration

ROW_BLOCK = 1 << 17
"""Elements that are encoded at once: with all their forms they stay in the processor's cache."""


@dataclass
class Place:
    """The open rank files, and what is found out while they are filled. Safe for several threads."""

    files: Mapping[int, RankFile]
    descriptors: Mapping[int, int]
    sources: Sources
    dtype: str
    advance: Callable[[int], None]
    stop: Event
    extents: dict[Piece, Extent] = field(default_factory=dict)
    overflows: list[OverflowedTensor] = field(default_factory=list)

    def put(self, stored: StoredTensor, values: Array, at: int = 0) -> None:
        """Write numbers of a tensor from its byte `at` on."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        file = self.files[stored.rank]
        begin, written = file.offsets[stored.name] + at, 0
        while written < len(data):
            if self.stop.is_set():
                raise Stopped
            try:
                written += os.pwrite(self.descriptors[stored.rank], data[written:], begin + written)
            except OSError as error:
                error.filename = str(file.path)
                raise
        self.advance(len(data))


@dataclass(frozen=True)
class Smoothing:
    """Factors of the input of one part: as the calibration found them, and the ones of the whole linear.

    Attributes:
        found: (in,), float32 where the calibration kept them so.
        own, common: the part's and the linear's, rounded to the type of the weight.
    """

    found: Array
    own: Array
    common: Array

    def smooth(self, rows: Array) -> Array:
        """Rows of the weight as they are quantized."""
        smoothed = awq.smooth(rows, self.found)
        return smoothed if np.array_equal(self.own, self.common) else awq.move(smoothed, self.own, self.common)


@dataclass(frozen=True)
class LinearWork:
    """One linear, or mlp.fc and mlp.gate where they share scales.

    Attributes:
        linears: linear → suffix → the tensors of all ranks.
    """

    format: str
    group: int
    linears: Sequence[tuple[Linear, Mapping[str, Sequence[StoredTensor]]]]
    calibration: Calibration | None

    def __call__(self, place: Place) -> None:
        """Write all tensors of all ranks.

        Raises:
            OSError: writing failed.
            SourceError: the calibration lacks a number, or a file of the source is gone.
        """
        how = codec(self.format, self.group)
        smoothings = {linear.module: self._smoothings(linear, place) for linear, _ in self.linears}
        largest: dict[int | None, float] = {}
        if how.per_tensor:
            for linear, _ in self.linears:
                for part, smoothing in zip(linear.parts, smoothings[linear.module]):
                    found = self._largest(part, smoothing, place)
                    largest[part.expert] = max(largest.get(part.expert, 0.0), found)
        input_largest = self._input_largest() if how.input_scale is not None else 0.0
        for linear, stored in self.linears:
            factors = smoothings[linear.module]
            self._write_numbers(how, stored, list(largest.values()), input_largest, factors[0], place)
            for number, part in enumerate(linear.parts):
                self._write_part(how, number, part, stored, largest.get(part.expert, 0.0), factors[number], place)

    def _input_largest(self) -> float:
        assert self.calibration is not None
        modules = list(dict.fromkeys(part.module for linear, _ in self.linears for part in linear.parts))
        # An expert that no text of the calibration reached has none; the others' stands for it.
        known = [name for name in modules if self.calibration.has(f"{name}.input_quantizer._amax")] or modules[:1]
        return max(self.calibration.input_amax(name) for name in known)

    def _smoothings(self, linear: Linear, place: Place) -> list[Smoothing | None]:
        if self.format not in SMOOTHED:
            return [None] * len(linear.parts)
        assert self.calibration is not None
        dtype = NUMPY_TYPES[place.sources.tensors[linear.parts[0].pieces[0].source].dtype]
        # ModelOpt adds an expert's gate before its up; the order decides the last bit of the mean.
        ordered = sorted(linear.parts, key=lambda part: (part.expert or 0, part.role == "up"))
        modules = list(dict.fromkeys(part.module for part in ordered))
        known = [name for name in modules if self.calibration.has_factors(name)]
        found = {name: self.calibration.pre_quant_scale(name) for name in known or modules}
        own = {name: factors.astype(dtype) for name, factors in found.items()}
        common = awq.merged_scale(list(own.values())) if len(own) > 1 else next(iter(own.values()))
        for part in ordered:
            if part.module not in own:
                # An expert that no text of the calibration reached has none: it takes the mean of the others' as own.
                alike = {
                    one.module: own[one.module] for one in ordered if one.role == part.role and one.module in known
                }
                found[part.module] = own[part.module] = awq.merged_scale(list(alike.values())) if alike else common
        return [Smoothing(found[part.module], own[part.module], common) for part in linear.parts]

    def _largest(self, part: LinearPart, smoothing: Smoothing | None, place: Place) -> float:
        largest = 0.0
        for piece in part.pieces:
            found = []
            for _, rows in _blocks(piece, place):
                found.append(extent(rows if smoothing is None else smoothing.smooth(rows)))
            joined = Extent.joined(found)
            largest = max(largest, joined.largest)
            if smoothing is None:
                place.extents[replace(piece, at=0)] = joined
        return largest

    def _write_numbers(
        self,
        how: Codec,
        stored: Mapping[str, Sequence[StoredTensor]],
        largest: list[float],
        input_largest: float,
        smoothing: Smoothing | None,
        place: Place,
    ) -> None:
        """Everything that does not go by rows."""
        numbers: dict[str, Array] = dict(weight_scales(self.format, np.array(largest, np.float32)))
        if how.input_scale is not None:
            numbers[INPUT_SCALE] = how.input_scale(np.array([input_largest], np.float32))
        for suffix, values in numbers.items():
            for tensor in stored[suffix]:
                place.put(tensor, values)
        if smoothing is not None:
            factors = smoothing.common.astype(NUMPY_TYPES[place.dtype])
            for tensor in stored[FACTORS]:
                begin, end = tensor.planned.pieces[0].columns
                experts = tensor.shape[0] if len(tensor.shape) == 2 else 1
                place.put(tensor, np.tile(factors[begin:end], experts))

    def _write_part(
        self,
        how: Codec,
        number: int,
        part: LinearPart,
        stored: Mapping[str, Sequence[StoredTensor]],
        largest: float,
        smoothing: Smoothing | None,
        place: Place,
    ) -> None:
        source = place.sources.tensors[part.pieces[0].source]
        encode = encoder(self.format, self.group, largest, NUMPY_TYPES[source.dtype])
        targets = [
            (suffix, tensor, piece)
            for suffix in how.divisors
            for tensor in stored[suffix]
            for piece in tensor.planned.pieces
            if piece.part == number
        ]
        for piece in part.pieces:
            found = []
            for begin, rows in _blocks(piece, place):
                if not (how.per_tensor and smoothing is None):
                    found.append(extent(rows))
                encoded = encode(rows if smoothing is None else smoothing.smooth(rows))
                first = piece.at + begin
                for suffix, tensor, target in targets:
                    _put_rows(tensor, target, encoded[suffix], first, len(rows), how.divisors[suffix], place)
            if found:
                place.extents[replace(piece, at=0)] = Extent.joined(found)


@dataclass(frozen=True)
class CacheWork:
    """Scales of the KV cache of all layers."""

    scales: Mapping[str, Sequence[float]]
    stored: Sequence[StoredTensor]

    def __call__(self, place: Place) -> None:
        """Write the scales of keys, values, and the larger of both."""
        for tensor in self.stored:
            assert tensor.planned.linear is not None
            key, value = self.scales[attention_module(tensor.planned.linear)]
            number = dict(zip(CACHE_SCALES, (max(key, value), key, value)))[tensor.suffix]
            place.put(tensor, np.array([number], np.float32))


def attention_module(linear: Linear) -> str:
    """The HF module of the attention that a qkv belongs to ("model.layers.0.self_attn")."""
    return linear.parts[0].module.rpartition(".")[0]


def _blocks(piece: Piece, place: Place) -> Iterator[tuple[int, Array]]:
    """(first row, rows) of a piece, an even number of rows at a time."""
    count, columns = piece.rows[1] - piece.rows[0], piece.columns[1] - piece.columns[0]
    step = max(2, ROW_BLOCK // columns // 2 * 2)
    for begin in range(0, count, step):
        if place.stop.is_set():
            raise Stopped
        rows = read_rows(place.sources, piece, begin, min(begin + step, count))
        yield begin, np.ascontiguousarray(rows)


def _put_rows(
    tensor: StoredTensor,
    target: Piece,
    encoded: Array,
    first: int,
    count: int,
    divisors: tuple[int, int],
    place: Place,
) -> None:
    """Write what a rank's piece has of rows `first` … `first + count` of the part."""
    begin = max(first, target.part_row)
    end = min(first + count, target.part_row + target.rows[1] - target.rows[0])
    if begin >= end:
        return
    by_rows, by_columns = divisors
    block = encoded[(begin - first) // by_rows : (end - first) // by_rows]
    if by_columns:
        block = block[:, target.columns[0] // by_columns : target.columns[1] // by_columns]
    row_bytes = block.nbytes // len(block)
    place.put(tensor, block, (target.at + begin - target.part_row) // by_rows * row_bytes)
