"""The pieces of work of a conversion, each on one tensor or one linear; workers take them in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lpxbuild.checkpoint.cast import NUMPY_TYPES
from lpxbuild.checkpoint.layout import Linear
from lpxbuild.checkpoint.quantized_codecs import codec
from lpxbuild.checkpoint.quantized_layout import CACHE_SCALES, PLAIN, WEIGHT, StoredTensor
from lpxbuild.checkpoint.quantized_transfer import ROW_BLOCK, CacheWork, LinearWork, Place, attention_module
from lpxbuild.checkpoint.reexpress import Reexpressed
from lpxbuild.checkpoint.report import OverflowedTensor
from lpxbuild.checkpoint.transfer import transfer
from lpxbuild.quantization import fp8, int8
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source.quantized.arrays import mapped

if TYPE_CHECKING:
    from lpxbuild.source import Source

Work = Callable[[Place], None]


@dataclass(frozen=True)
class PlainWork:
    """A tensor that is copied or cast."""

    stored: StoredTensor

    def __call__(self, place: Place) -> None:
        """Write it."""
        rank, name = self.stored.rank, self.stored.name
        file = place.files[rank]
        try:
            overflow, seen = transfer(
                self.stored.planned,
                place.sources,
                place.descriptors[rank],
                file.offsets[name],
                place.dtype,
                place.advance,
                place.stop,
            )
        except OSError as error:
            error.filename = str(file.path)
            raise
        # Several ranks may hold the same piece; it is counted once.
        place.extents.update({replace(piece, at=0): extent for piece, extent in seen.items()})
        if overflow is not None:
            place.overflows.append(OverflowedTensor(rank, name, overflow.count, overflow.largest))


@dataclass(frozen=True)
class ReexpressWork:
    """A linear of one rank whose source is quantized already."""

    linear: Reexpressed
    stored: Mapping[str, StoredTensor]

    def __call__(self, place: Place) -> None:
        """Write the weight and everything beside it."""
        weight = self.stored[WEIGHT]
        columns = self.linear.tensor.shape[-1]
        rows = self.linear.tensor.size // columns
        step = max(2, ROW_BLOCK // columns // 2 * 2)
        at = 0
        for begin in range(0, rows, step):
            block = self.linear.weight_rows(begin, min(begin + step, rows))
            place.put(weight, block, at)
            at += block.nbytes
        for suffix, values in self.linear.scales(NUMPY_TYPES[place.dtype]).items():
            place.put(self.stored[suffix], values)


def works_of(
    source: Source, stored: Sequence[StoredTensor], scheme: Scheme, calibration: Calibration | None
) -> list[Work]:
    """Everything that is to be done; ranks that share a source tensor follow each other."""
    works: list[Work] = []
    by_linear: dict[int, dict[str, list[StoredTensor]]] = {}
    cache: list[StoredTensor] = []
    for tensor in stored:
        if tensor.suffix in CACHE_SCALES:
            cache.append(tensor)
        elif tensor.format in PLAIN:
            works.append(PlainWork(tensor))
        else:
            by_linear.setdefault(id(tensor.planned.linear), {}).setdefault(tensor.suffix, []).append(tensor)
    pairs: dict[tuple[int, str], list[dict[str, list[StoredTensor]]]] = {}
    for suffixes in by_linear.values():
        weight = suffixes[WEIGHT][0]
        linear = weight.planned.linear
        assert linear is not None
        if source.quantization is not None:
            works += _reexpressed(source, suffixes, scheme)
            continue
        parent, _, last = linear.module.rpartition(".")
        gated = codec(weight.format, scheme.group_size).gated and last in ("fc", "gate")
        pairs.setdefault((linear.layer, f"{parent}.fc" if gated else linear.module), []).append(suffixes)
    for members in pairs.values():
        linears = [(_linear(suffixes), suffixes) for suffixes in members]
        works.append(LinearWork(members[0][WEIGHT][0].format, scheme.group_size, linears, calibration))
    if cache:
        works.append(CacheWork(cache_scales(source, cache, scheme, calibration), cache))
    return works


def _linear(suffixes: Mapping[str, Sequence[StoredTensor]]) -> Linear:
    linear = suffixes[WEIGHT][0].planned.linear
    assert linear is not None
    return linear


def _reexpressed(source: Source, suffixes: Mapping[str, Sequence[StoredTensor]], scheme: Scheme) -> list[Work]:
    assert source.quantization is not None
    read = mapped(source.tensors)
    return [
        ReexpressWork(
            Reexpressed(weight.planned, source.quantization, read, scheme.group_size),
            {suffix: tensors[number] for suffix, tensors in suffixes.items()},
        )
        for number, weight in enumerate(suffixes[WEIGHT])
    ]


def cache_scales(
    source: Source, cache: Sequence[StoredTensor], scheme: Scheme, calibration: Calibration | None
) -> dict[str, tuple[float, float]]:
    """HF attention module → scales of keys and values. FP8 has no scale below 1, as NVIDIA's exports have none."""
    scales = {}
    for tensor in cache:
        assert tensor.planned.linear is not None
        attention = attention_module(tensor.planned.linear)
        if source.quantization is not None:
            pair = source.quantization.key_value_scale(mapped(source.tensors), attention, source.tensors)
        elif calibration is None:
            pair = 1.0, 1.0  # FP8 alone may go without: see only_fp8_cache
        else:
            scale = fp8.scale if scheme.kv_cache == "fp8" else int8.scale
            key, value = calibration.key_value_amax(attention)
            pair = float(scale(key)), float(scale(value))
        scales[attention] = (max(pair[0], 1.0), max(pair[1], 1.0)) if scheme.kv_cache == "fp8" else pair
    return scales
