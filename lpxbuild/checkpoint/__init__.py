"""TensorRT-LLM checkpoints: the streaming converter, and the reader that engines use."""

from __future__ import annotations

from lpxbuild.checkpoint.convert import check_scheme, convert
from lpxbuild.checkpoint.reader import CheckpointReader, read
from lpxbuild.checkpoint.report import ConversionReport, OverflowedTensor, RankStatistics

__all__ = [
    "CheckpointReader",
    "ConversionReport",
    "OverflowedTensor",
    "RankStatistics",
    "check_scheme",
    "convert",
    "read",
]
