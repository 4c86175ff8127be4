"""The streaming converter: Hugging Face tensors straight into preallocated TensorRT-LLM rank files."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeVar

from lpxbuild.checkpoint.cast import NUMPY_TYPES, SAFETENSORS_NAMES
from lpxbuild.checkpoint.config import trtllm_config
from lpxbuild.checkpoint.layout import RankTensor, plan
from lpxbuild.checkpoint.quantized_config import linear_formats, quant_cfg, quantization_fields
from lpxbuild.checkpoint.quantized_layout import StoredTensor, check_storable, stored_tensors
from lpxbuild.checkpoint.quantized_transfer import Place, attention_module
from lpxbuild.checkpoint.rank_file import RankFile, rank_file_name
from lpxbuild.checkpoint.report import ConversionReport, OverflowedTensor, RankStatistics
from lpxbuild.checkpoint.running import guarded, host_error, notice_non_finite, plan_workers, run, usual_workers
from lpxbuild.checkpoint.statistics import Extent
from lpxbuild.checkpoint.transfer import WORKER_BYTES, Sources
from lpxbuild.checkpoint.works import Work, works_of
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.families import family_named
from lpxbuild.memory import gigabytes
from lpxbuild.output import Output
from lpxbuild.quantization import FORMATS
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import tokenizer_files
from lpxbuild.source.quantized import check_contents
from lpxbuild.source.quantized.arrays import mapped

if TYPE_CHECKING:
    from lpxbuild.families import ModelShape
    from lpxbuild.source import Source

Advance = Callable[[int], None]
T = TypeVar("T")

UNQUANTIZED = Scheme()


def convert(
    source: Source,
    destination: Path,
    *,
    dtype: str,
    scheme: Scheme = UNQUANTIZED,
    calibration: Calibration | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    workers: int | None = None,
    output: Output | None = None,
) -> ConversionReport:
    """Write a TensorRT-LLM checkpoint: config.json, rank{N}.safetensors, tokenizer/, quant_cfg.json if formats differ.

    One block after the other goes from the mapped source to its place; nothing is held whole. `int8_wo` and `int4_wo`
    keep plain weights and name the algorithm: TensorRT-LLM's builder quantizes them for its GPU while loading, and
    what it would do with weights quantized here depends on the architecture of the GPU that runs them.
    Kernel sizes are not looked at here (`quantization.check_shapes` is the build's check).
    A source that is quantized already keeps its formats.

    Args:
        source: a checked source.
        destination: a fresh folder; on failure it holds an unfinished checkpoint without config.json.
        dtype: float32, float16, bfloat16, or auto for the source's.
        scheme: formats of the linears, and of the KV cache.
        calibration: needed for formats with factors or scales of the input, and for a quantized KV cache.
        workers: threads; None = one for each CPU of this process, at most 4. Fewer are used, with a notice, where
            memory is short.

    Raises:
        RecipeError: a mixture of formats that TensorRT-LLM cannot load, or a calibration is missing.
        SourceError: sizes that cannot be split so, or a tensor type that is no weight type.
        HostError: not enough memory or disk, or writing failed; names the path and the reason.
    """
    output = output if output is not None else Output.quiet()
    started = time.perf_counter()
    shape = source.shape
    dtype = shape.dtype if dtype == "auto" else dtype
    if source.quantization is not None:
        scheme = source.quantization.scheme
        check_contents(source.quantization, mapped(source.tensors))
    else:
        _check_calibration(scheme, calibration, output)
    workers = workers if workers is not None else usual_workers()
    kind = SAFETENSORS_NAMES[dtype]
    tensors = list(plan(shape, tensor_parallel, pipeline_parallel))
    formats = linear_formats(tensors, scheme)
    check_storable(tensors, scheme)
    _check_types(source, tensors)
    stored = list(stored_tensors(tensors, scheme, kind))
    works = works_of(source, stored, scheme, calibration)

    destination.mkdir(parents=True, exist_ok=True)
    by_rank: dict[int, list[StoredTensor]] = {}
    for tensor in stored:
        by_rank.setdefault(tensor.rank, []).append(tensor)
    files = {rank: RankFile.of(destination / rank_file_name(rank), by_rank[rank]) for rank in sorted(by_rank)}
    total = sum(file.size for file in files.values())
    workers = plan_workers(
        destination,
        total,
        min(workers, len(works)),
        memory_each=WORKER_BYTES,
        largest_mapping=_largest_mapping(source, tensors),
        files=f" into {len(files)} rank file(s)",
        output=output,
    )
    with output.progress("checkpoint", total - sum(len(file.header) for file in files.values())) as advance:
        overflows, extents = _write(source, works, files, destination, kind, workers, advance)
    _carry_tokenizer(source, destination)
    config = trtllm_config(
        shape,
        dtype=dtype,
        scheme=scheme,
        quantization=quantization_fields(formats, scheme),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        generation={
            "end_ids": list(source.end_ids),
            "pad_id": source.pad_id,
            "bos_id": source.bos_id,
            "source": source.origin,
        },
    )
    layers = quant_cfg(formats, scheme)
    if layers is not None:
        text = json.dumps(layers, indent=2) + "\n"
        guarded(destination / "quant_cfg.json", partial((destination / "quant_cfg.json").write_text, text))
    # Last, so that a folder with a config.json has all of its ranks.
    text = json.dumps(config, indent=2) + "\n"
    guarded(destination / "config.json", partial((destination / "config.json").write_text, text))
    _notice_overflows(overflows, dtype, output)
    notice_non_finite(extents, output)
    used = _read(source, tensors)
    report = ConversionReport(
        dtype=dtype,
        quantization_format=scheme.format,
        parameters=sum(prod(source.tensors[name].shape) for name in used)
        if source.quantization is None
        else source.parameters,
        ranks=tuple(RankStatistics(file.path.name, file.size, len(by_rank[rank])) for rank, file in files.items()),
        casts=dict(Counter(found for name in used if (found := source.tensors[name].dtype) != kind)),
        overflows=overflows,
        kv_amax=_key_value_amax(tensors, scheme, calibration),
        extents=extents,
        workers=workers,
        memory_needed=workers * WORKER_BYTES,
        seconds=time.perf_counter() - started,
    )
    output.step(f"checkpoint: {len(files)} rank file(s), {gigabytes(report.bytes)} in {report.seconds:.1f} s")
    return report


def check_scheme(shape: ModelShape, scheme: Scheme, tensor_parallel: int, pipeline_parallel: int) -> None:
    """Refuse formats and patterns that a TensorRT-LLM checkpoint cannot hold. Needs neither weights nor a calibration.

    Raises:
        RecipeError: a pattern that fits nothing, a mixture that TensorRT-LLM cannot load.
        SourceError: sizes that a format's groups and bytes cannot hold.
    """
    tensors = list(plan(shape, tensor_parallel, pipeline_parallel))
    parts = [part.module for tensor in tensors if tensor.linear is not None for part in tensor.linear.parts]
    modules = {name.rpartition(".")[0] for name in family_named(shape.family).tensors(shape)}
    scheme.check_patterns(dict.fromkeys(parts), modules.difference(parts))
    linear_formats(tensors, scheme)
    check_storable(tensors, scheme)


def _check_calibration(scheme: Scheme, calibration: Calibration | None, output: Output) -> None:
    if calibration is None and scheme.only_fp8_cache:
        output.notice(
            "checkpoint: the scales of the FP8 KV cache are 1.0: nothing was measured. TensorRT-LLM's own exports have "
            "no scale below 1.0 either; keys or values above 448 would be cut off: write `calibration: {}` below "
            "`quantization` to have them measured (extra `calibrate`)"
        )
    elif calibration is None and scheme.needs_calibration:
        calibrated = [name for name in scheme.formats if FORMATS[name].needs_calibration]
        what = f"format {calibrated[0]}" if calibrated else f"kv_cache {scheme.kv_cache}"
        raise RecipeError(
            f"quantization.{what} needs a calibration",
            why="its scales come from text that is run through the model; without it they would all be guessed",
            next="calibrate first: lpx build RECIPE",
        )


def _key_value_amax(
    tensors: Sequence[RankTensor], scheme: Scheme, calibration: Calibration | None
) -> dict[str, tuple[float, float]]:
    if calibration is None or scheme.kv_cache == "none":
        return {}
    modules = [attention_module(one.linear) for one in tensors if one.linear is not None and one.linear.split == "qkv"]
    return {module: calibration.key_value_amax(module) for module in dict.fromkeys(modules)}


def _read(source: Source, tensors: Sequence[RankTensor]) -> set[str]:
    """Names of the plain source tensors that the plan reads: all but weights that are quantized already."""
    quantized = () if source.quantization is None else source.quantization.linears
    names = {piece.source for tensor in tensors for piece in tensor.pieces}
    return {name for name in names if name.removesuffix(".weight") not in quantized}


def _check_types(source: Source, tensors: Sequence[RankTensor]) -> None:
    for name in sorted(_read(source, tensors)):
        entry = source.tensors.get(name)
        if entry is None:
            raise SourceError(
                f"tensor {name} is missing from the source",
                why="the model cannot be written without it",
                next=f"download the files of {source.origin} again",
            )
        if entry.dtype not in NUMPY_TYPES:
            raise SourceError(
                f"tensor {name} has type {entry.dtype}",
                why=f"weights are read as one of {', '.join(NUMPY_TYPES)}",
                next="use the unquantized weights of the model",
            )


def _largest_mapping(source: Source, tensors: Sequence[RankTensor]) -> int:
    stored = () if source.quantization is None else source.quantization.expected
    names = {*_read(source, tensors), *(name for name in stored if name in source.tensors)}
    return max(source.tensors[name].nbytes for name in names)


def _write(
    source: Source,
    works: Sequence[Work],
    files: dict[int, RankFile],
    destination: Path,
    dtype: str,
    workers: int,
    advance: Advance,
) -> tuple[tuple[OverflowedTensor, ...], dict[str, Extent]]:
    sources = Sources(source.tensors)
    descriptors: dict[int, int] = {}
    try:
        for rank, file in files.items():
            descriptors[rank] = guarded(file.path, file.create)
        place = Place(files, descriptors, sources, dtype, advance, Event())

        def work(one: Work) -> None:
            try:
                one(place)
            except OSError as error:
                raise host_error(Path(error.filename or destination), error) from error

        run(works, work, workers, place.stop)
        by_tensor: dict[str, list[Extent]] = {}
        for piece, extent in place.extents.items():
            by_tensor.setdefault(piece.source, []).append(extent)
        return (
            tuple(sorted(place.overflows, key=lambda item: (item.rank, item.tensor))),
            {name: Extent.joined(by_tensor[name]) for name in sorted(by_tensor)},
        )
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
        sources.close()


def _carry_tokenizer(source: Source, destination: Path) -> None:
    files = tokenizer_files(source.path)
    if not files:
        return
    target = destination / "tokenizer"
    target.mkdir()
    for file in files:
        guarded(target / file.name, partial(shutil.copyfile, file, target / file.name))
    # The ids that were settled from all of the source's files: models inside Triton read this one only.
    generation = {**source.generation_config, "eos_token_id": list(source.end_ids), "pad_token_id": source.pad_id}
    path = target / "generation_config.json"
    guarded(path, partial(path.write_text, json.dumps(generation, indent=2) + "\n"))


def _notice_overflows(overflows: Sequence[OverflowedTensor], dtype: str, output: Output) -> None:
    if not overflows:
        return
    worst = max(overflows, key=lambda item: item.largest)
    count = sum(item.count for item in overflows)
    output.notice(
        f"checkpoint: {count} number(s) in {len(overflows)} tensor(s) are too large for {dtype} and became infinite "
        f"(largest {worst.largest:g}, in {worst.tensor} of rank {worst.rank}); set model.dtype to bfloat16 or float32"
    )
