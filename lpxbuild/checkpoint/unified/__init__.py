"""Unified Hugging Face checkpoints, which TensorRT-LLM's PyTorch backend and vLLM load: writer and reader."""

from __future__ import annotations

from lpxbuild.checkpoint.reexpress_unified import check_source
from lpxbuild.checkpoint.unified.checks import check_unified
from lpxbuild.checkpoint.unified.convert import convert_unified
from lpxbuild.checkpoint.unified.reader import UnifiedReader, read_unified

__all__ = ["UnifiedReader", "check_source", "check_unified", "convert_unified", "read_unified"]
