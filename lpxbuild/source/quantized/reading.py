"""From the settings of a folder to the method that reads them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from lpxbuild.families import Family, ModelShape
from lpxbuild.source.quantized.method import Method, Reader, refusal
from lpxbuild.source.quantized.modules import modules_of
from lpxbuild.source.quantized.records import SourceQuantization
from lpxbuild.source.quantized.settings import Settings, quantization_settings
from lpxbuild.source.records import TensorEntry


@lru_cache(maxsize=1)
def methods() -> tuple[Method, ...]:
    """Every method, by the names of the files."""
    found = (
        getattr(importlib.import_module(f"{__package__}.{module.name}"), "METHOD", None)
        for module in pkgutil.iter_modules([str(Path(__file__).parent)])
    )
    return tuple(method for method in found if isinstance(method, Method))


def settings_of(path: Path, config: Mapping[str, Any]) -> Settings | None:
    """What a folder says of its quantization, None for plain weights.

    Raises:
        SourceError: a method that lpx does not read, with the reason or with those that it reads.
    """
    settings = quantization_settings(path, config)
    if settings is not None:
        _method_of(settings)
    return settings


def read_quantization(
    settings: Settings, family: Family, shape: ModelShape, tensors: Mapping[str, TensorEntry]
) -> SourceQuantization:
    """What the settings and the files' headers say about every linear layer of the model.

    Raises:
        SourceError: a kind that lpx does not read; settings that contradict themselves.
    """
    found = _method_of(settings)(settings, modules_of(family, shape), tensors)
    if not found.linears:
        raise refusal(settings, "but no linear layer of the model is", why="the settings belong to other weights")
    without = [
        name for name, pair in found.key_value_scales.items() if tensors and not all(scale in tensors for scale in pair)
    ]
    if without:
        notice = f"the source has an FP8 KV cache, but no scales of it for {without[0]}: 1.0 is taken, as engines do"
        return replace(found, notices=(*found.notices, notice))
    return found


def _method_of(settings: Settings) -> Reader:
    for method in methods():
        if settings.method in method.reasons:
            raise refusal(settings, "which lpx does not read", why=method.reasons[settings.method])
        if settings.method in method.names and method.read is not None:
            return method.read
    known = ", ".join(method.title for method in methods() if method.read is not None)
    raise refusal(settings, "which lpx does not read", why=f"of quantized sources, it reads those of {known}")
