"""Sources whose weights are quantized already: one file for each method.

A module of this package that defines `METHOD` is a method; adding one adds it everywhere. `settings_of` looks for one,
`read_quantization` tells from the headers of the weight files what is there, `check_use` says whether a recipe can have
it.
"""

from __future__ import annotations

from lpxbuild.source.quantized.method import ORIGINAL
from lpxbuild.source.quantized.reading import methods, read_quantization, settings_of
from lpxbuild.source.quantized.records import ExpectedTensor, QuantizedLinear, Read, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.quantized.use import check_backend, check_contents, check_settings, check_use, renamed

__all__ = [
    "ORIGINAL",
    "ExpectedTensor",
    "QuantizedLinear",
    "Read",
    "Settings",
    "SourceQuantization",
    "check_backend",
    "check_contents",
    "check_settings",
    "check_use",
    "methods",
    "read_quantization",
    "renamed",
    "settings_of",
]
