"""Quantization formats: the closed list, the sizes their kernels take, the arithmetic of weight-only.

`weight_only` is imported where it is used, because it needs numpy.
"""

from __future__ import annotations

from lpxbuild.quantization.formats import (
    FORMATS,
    KV_CACHE,
    Format,
    check_kv_cache,
    format_for,
    kv_cache_table,
    markdown_table,
)
from lpxbuild.quantization.sizes import check_shapes

__all__ = [
    "FORMATS",
    "KV_CACHE",
    "Format",
    "check_kv_cache",
    "check_shapes",
    "format_for",
    "kv_cache_table",
    "markdown_table",
]
