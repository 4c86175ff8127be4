"""The streaming writer of unified Hugging Face checkpoints, for the backends pytorch and vllm."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from lpxbuild.checkpoint.cast import NUMPY_TYPES, SAFETENSORS_NAMES
from lpxbuild.checkpoint.reexpress_unified import QuantizedWork, cache_calibration, check_source, modelopt_scheme
from lpxbuild.checkpoint.report import ConversionReport, OverflowedTensor, RankStatistics
from lpxbuild.checkpoint.running import guarded, host_error, notice_non_finite, plan_workers, run, usual_workers
from lpxbuild.checkpoint.transfer import WORKER_BYTES, Sources
from lpxbuild.checkpoint.unified.checks import check_unified
from lpxbuild.checkpoint.unified.encoding import ENCODINGS, stored
from lpxbuild.checkpoint.unified.modules import Modules, model_modules
from lpxbuild.checkpoint.unified.passing import carry, pass_through
from lpxbuild.checkpoint.unified.quant_config import hf_quant_config, quantization_config
from lpxbuild.checkpoint.unified.shards import INDEX, MAX_SHARD_BYTES, Shard, StoredTensor, index_text, split
from lpxbuild.checkpoint.unified.smoothing import SMOOTHED, Smoothing, folds, smoothings
from lpxbuild.checkpoint.unified.writing import CopyWork, FoldWork, GroupWork, Place, Work, input_largest
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.memory import gigabytes
from lpxbuild.output import Output
from lpxbuild.quantization import fp8
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source.quantized import check_contents, renamed
from lpxbuild.source.quantized.arrays import mapped

if TYPE_CHECKING:
    from lpxbuild.source import Source
    from lpxbuild.source.quantized import Read, SourceQuantization

UNQUANTIZED = Scheme()


def convert_unified(
    source: Source,
    destination: Path,
    *,
    dtype: str,
    scheme: Scheme = UNQUANTIZED,
    calibration: Calibration | None = None,
    backend: str | None = None,
    workers: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    output: Output | None = None,
) -> ConversionReport:
    """Write a unified Hugging Face checkpoint: safetensors, config.json, hf_quant_config.json, tokenizer files.

    The tensors are bit for bit those of NVIDIA ModelOpt's `export_hf_checkpoint` with the same calibration. One block
    after the other goes from the mapped source to its place; nothing is held whole. A source that is quantized already
    goes through as it is.

    Args:
        source: a checked source.
        destination: a fresh folder; on failure it holds an unfinished checkpoint without config.json.
        dtype: float32, float16, bfloat16, or auto for the source's.
        scheme: formats of the linears, and of the KV cache.
        calibration: needed for formats with scales of the input or factors, and for an FP8 KV cache.
        backend: who is to load it; what it would misread is refused, and it decides whether a source that is quantized
            already goes through as it is.
        workers: threads; None = one for each CPU of this process, at most 4. Fewer are used where memory is short.
        max_shard_bytes: tensors beyond this go to the next file.

    Raises:
        RecipeError: what the layout cannot hold, or a calibration is missing.
        SourceError: sizes that a format's blocks do not divide, or a damaged source.
        HostError: not enough memory or disk, or writing failed; names the path and the reason.
    """
    output = output if output is not None else Output.quiet()
    started = time.perf_counter()
    shape = source.shape
    already = source.quantization
    if already is not None:
        check_contents(already, mapped(source.tensors))
        check_source(source, backend)
        if not renamed(already, shape, backend):
            return _pass_through(source, destination, dtype=dtype, output=output)
        scheme, calibration = modelopt_scheme(already), cache_calibration(source)
    dtype = shape.dtype if dtype == "auto" else dtype
    kind = SAFETENSORS_NAMES[dtype]
    if already is None:
        check_unified(shape, scheme, backend=backend)
    modules = model_modules(shape)
    formats = {module.name: scheme.format_of(module.name) for module in modules.linears}
    if already is None:
        _check_calibration(formats, scheme, calibration)
    _check_types(source, [name for name in modules.tensors if already is None or not already.holds(name)])

    known = calibration if calibration is not None else Calibration({})
    smoothing = smoothings(modules, formats, known, NUMPY_TYPES[kind]) if already is None else {}
    numbers = _key_value_scales(modules, scheme, known)
    tensors = _stored(source, modules, formats, scheme.group_size, smoothing, numbers, kind)
    works = _works(modules, formats, scheme.group_size, smoothing, known, already, mapped(source.tensors))
    destination.mkdir(parents=True, exist_ok=True)
    shards = split(destination, tensors, max_shard_bytes)
    total = sum(shard.size for shard in shards)
    used = [source.tensors[name] for name in modules.tensors if already is None or name in source.tensors]
    workers = plan_workers(
        destination,
        total,
        workers if workers is not None else usual_workers(),
        memory_each=_memory_each(modules, formats),
        largest_mapping=max(entry.nbytes for entry in used),
        output=output,
    )
    with output.progress("checkpoint", sum(tensor.nbytes for tensor in tensors)) as advance:
        place = _write(source, shards, tensors, works, numbers, kind, workers, advance)
    carry(source, destination)
    if len(shards) > 1:
        _write_text(destination / INDEX, index_text(shards, sum(tensor.nbytes for tensor in tensors)))
    quant_config = hf_quant_config(scheme, modules)
    if quant_config is not None:
        _write_text(destination / "hf_quant_config.json", json.dumps(quant_config, indent=4) + "\n")
    # Last, so that a folder with a config.json has all of its weights.
    _write_text(destination / "config.json", json.dumps(_config(source, dtype, quant_config), indent=2) + "\n")
    _notice(place, dtype, output)
    report = ConversionReport(
        dtype=dtype,
        quantization_format=scheme.format,
        parameters=sum(prod(entry.shape) for entry in used) if already is None else source.parameters,
        ranks=tuple(RankStatistics(shard.path.name, shard.size, len(shard.offsets)) for shard in shards),
        casts=dict(Counter(entry.dtype for entry in used if entry.dtype != kind)),
        overflows=tuple(
            OverflowedTensor(0, name, lost.count, lost.largest) for name, lost in sorted(place.overflows.items())
        ),
        kv_amax=numbers,
        extents={name: place.extents[name] for name in sorted(place.extents)},
        workers=workers,
        memory_needed=workers * _memory_each(modules, formats),
        seconds=time.perf_counter() - started,
    )
    output.step(f"checkpoint: {len(shards)} file(s), {gigabytes(report.bytes)} in {report.seconds:.1f} s")
    return report


def _pass_through(source: Source, destination: Path, *, dtype: str, output: Output) -> ConversionReport:
    started = time.perf_counter()
    if dtype not in ("auto", source.shape.dtype):
        output.notice(
            f"checkpoint: the files of a quantized source go through as they are: {source.shape.dtype}, not {dtype}"
        )
    total = sum(file.stat().st_size for file in {entry.file for entry in source.tensors.values()})
    with output.progress("checkpoint", total) as advance:
        passed = pass_through(source, destination, advance=advance)
    return replace(passed, parameters=source.parameters, seconds=time.perf_counter() - started)


def _check_calibration(formats: Mapping[str, str], scheme: Scheme, calibration: Calibration | None) -> None:
    needing = sorted(
        {
            name
            for name in formats.values()
            if name in SMOOTHED or (name != "none" and ENCODINGS[name].input_scale is not None)
        }
    )
    if calibration is not None or not (needing or scheme.kv_cache != "none"):
        return
    what = f"quantization format {needing[0]}" if needing else f"quantization.kv_cache {scheme.kv_cache}"
    raise RecipeError(
        f"{what} needs a calibration",
        why="its scales come from text that is run through the model",
        next="calibrate first: lpx build RECIPE",
    )


def _check_types(source: Source, names: Sequence[str]) -> None:
    for name in names:
        entry = source.tensors.get(name)
        if entry is None or entry.dtype not in NUMPY_TYPES:
            raise SourceError(
                f"tensor {name} " + ("is missing from the source" if entry is None else f"has type {entry.dtype}"),
                why=f"weights are read as one of {', '.join(NUMPY_TYPES)}",
                next=f"get the unquantized files of {source.origin} again",
            )


def _key_value_scales(modules: Modules, scheme: Scheme, calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Attention module → largest keys and values; empty without an FP8 KV cache."""
    if scheme.kv_cache != "fp8":
        return {}
    return {attention: calibration.key_value_amax(attention) for attention in modules.attention}


def _stored(
    source: Source,
    modules: Modules,
    formats: Mapping[str, str],
    group_size: int,
    smoothing: Mapping[str, Smoothing],
    key_values: Mapping[str, tuple[float, float]],
    kind: str,
) -> list[StoredTensor]:
    """All tensors of the checkpoint, in the order of the model."""
    linears = {module.piece.source: module for module in modules.linears if formats[module.name] != "none"}
    waiting = list(key_values)
    tensors: list[StoredTensor] = []
    for name in modules.tensors:
        module = linears.get(name)
        if module is None:
            tensors.append(StoredTensor(name, kind, source.tensors[name].shape))
        else:
            smooth = smoothing.get(module.name)
            tensors += stored(
                module, formats[module.name], group_size, kind, factors=smooth is not None and smooth.stored
            )
        if waiting and name.startswith(f"{waiting[0]}."):
            tensors += [StoredTensor(scale, "F32", ()) for scale in _scale_names(waiting.pop(0))]
    return tensors


def _scale_names(attention: str) -> tuple[str, str]:
    """Where loaders look for the scales of keys and values, whatever the projections are called."""
    return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"


def _works(
    modules: Modules,
    formats: Mapping[str, str],
    group_size: int,
    smoothing: Mapping[str, Smoothing],
    calibration: Calibration,
    already: SourceQuantization | None,
    read: Read,
) -> list[Work]:
    works: list[Work] = []
    done: set[str] = set()
    siblings = modules.siblings()
    for group in modules.groups:
        name = formats[group.modules[0].name]
        if name == "none":
            continue
        if already is not None:
            works.append(QuantizedWork(group, already, read))
            done.update(module.piece.source for module in group.modules)
            continue
        largest = input_largest(group, name, calibration, siblings)
        works.append(GroupWork(group, name, group_size, smoothing, largest))
        done.update(module.piece.source for module in group.modules)
        if group.norm is not None and folds(group, formats):
            works.append(FoldWork(group.norm, smoothing[group.modules[0].name].factors))
            done.update(group.norm.tensors)
    return [*works, *(CopyWork(name) for name in modules.tensors if name not in done)]


def _memory_each(modules: Modules, formats: Mapping[str, str]) -> int:
    """Anonymous bytes that one worker may need; a Conv1D is encoded in one piece."""
    whole = [prod(module.shape) for module in modules.linears if module.transposed and formats[module.name] != "none"]
    return max(WORKER_BYTES, 16 * max(whole, default=0))


def _write(
    source: Source,
    shards: Sequence[Shard],
    tensors: Sequence[StoredTensor],
    works: Sequence[Work],
    key_values: Mapping[str, tuple[float, float]],
    kind: str,
    workers: int,
    advance: Callable[[int], None],
) -> Place:
    sources = Sources(source.tensors)
    stop = Event()
    open_shards: dict[str, tuple[Shard, int]] = {}
    descriptors: list[int] = []
    try:
        for shard in shards:
            descriptors.append(guarded(shard.path, shard.create))
            open_shards.update(dict.fromkeys(shard.offsets, (shard, descriptors[-1])))
        place = Place(open_shards, {tensor.name: tensor for tensor in tensors}, sources, kind, stop, advance)

        def work(each: Work) -> None:
            try:
                each(place)
            except OSError as error:
                raise host_error(shards[0].path.parent, error) from error

        for attention, largest in key_values.items():
            for name, value in zip(_scale_names(attention), largest):
                place.number(name, value / fp8.MAX or 1.0)
        run(works, work, workers, stop)
        return place
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        sources.close()


def _config(source: Source, dtype: str, quant_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The source's own config.json with the type of the weights and, where there is one, the quantization."""
    config = dict(source.config)
    named = [key for key in ("dtype", "torch_dtype") if key in config]
    config.update(dict.fromkeys(named or ["torch_dtype"], dtype))
    if quant_config is not None:
        config["quantization_config"] = quantization_config(quant_config)
    return config


def _write_text(path: Path, text: str) -> None:
    guarded(path, partial(path.write_text, text))


def _notice(place: Place, dtype: str, output: Output) -> None:
    if place.overflows:
        worst = max(place.overflows, key=lambda name: place.overflows[name].largest)
        count = sum(lost.count for lost in place.overflows.values())
        output.notice(
            f"checkpoint: {count} number(s) in {len(place.overflows)} tensor(s) are too large for {dtype} and became "
            f"infinite (largest {place.overflows[worst].largest:g}, in {worst}); set model.dtype to bfloat16 or float32"
        )
    notice_non_finite(place.extents, output)
