"""A source that is quantized already goes through as it is: the same files, the same bytes.

The backends of this layout load compressed-tensors, GPTQ, AutoAWQ and ModelOpt's files themselves; written anew, they
could only lose something.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.checkpoint.report import ConversionReport, RankStatistics
from lpxbuild.checkpoint.resources import check_disk
from lpxbuild.checkpoint.running import guarded
from lpxbuild.source.code import code_files
from lpxbuild.source.folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    SLOW_TOKENIZER_FILES,
    TOKENIZER_FILES,
)

if TYPE_CHECKING:
    from lpxbuild.source import Source

BLOCK = 16 << 20
BESIDE = (*TOKENIZER_FILES, *SLOW_TOKENIZER_FILES, GENERATION_CONFIG)
"""Files of a source that loaders look for beside the weights."""


def carry(source: Source, destination: Path, names: tuple[str, ...] = BESIDE) -> None:
    """Copy small files as they are, those that the source has, and the Python files of a model that brings its own."""
    for name in (*names, *(file.name for file in code_files(source.path))):
        file = source.path / name
        if file.is_file():
            guarded(destination / name, partial(shutil.copyfile, file, destination / name))


def pass_through(source: Source, destination: Path, *, advance: Callable[[int], None]) -> ConversionReport:
    """Copy weights, index and settings of a quantized source.

    Raises:
        HostError: the disk is too small, or writing failed.
    """
    destination.mkdir(parents=True, exist_ok=True)
    files = sorted({entry.file for entry in source.tensors.values()})
    check_disk(destination, sum(file.stat().st_size for file in files))
    counts = {file: sum(entry.file == file for entry in source.tensors.values()) for file in files}
    for file in files:
        guarded(destination / file.name, partial(_copy, file, destination / file.name, advance))
    carry(source, destination, (*BESIDE, *QUANTIZATION_FILES, INDEX))
    # Last, so that a folder with a config.json has all of its weights.
    carry(source, destination, (CONFIG,))
    return ConversionReport(
        dtype=source.shape.dtype,
        quantization_format=(source.quantization.format if source.quantization else None) or "none",
        parameters=sum(prod(entry.shape) for entry in source.tensors.values()),
        ranks=tuple(RankStatistics(file.name, file.stat().st_size, counts[file]) for file in files),
    )


def _copy(source: Path, target: Path, advance: Callable[[int], None]) -> None:
    with source.open("rb", buffering=0) as reading, target.open("xb", buffering=0) as writing:
        while block := reading.read(BLOCK):
            view = memoryview(block)
            while view:
                view = view[writing.write(view) :]
            advance(len(block))
