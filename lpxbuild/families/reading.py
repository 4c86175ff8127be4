"""Typed reading of a Hugging Face config.json: a wrong value is named with its key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError

DTYPES = ("float32", "float16", "bfloat16")

LARGEST = 2**31 - 1
"""TensorRT-LLM's sizes are INT32."""


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise SourceError(
            f"config.json has no {key!r}",
            why="the model's size cannot be known without it",
            next="download config.json of the model again",
        )
    return value


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """`config[key]` as a count of 1 to `LARGEST`; absent or null means `default`.

    Raises:
        SourceError: absent without default, or not a whole number in that range.
    """
    value = _value(config, key, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not 1 <= value <= LARGEST:
        raise SourceError(
            f"config.json: {key} is {value!r}",
            why=f"a whole number from 1 to {LARGEST} is needed",
            next="compare config.json with the original repository of the model",
        )
    return int(value)


def positive_float(config: Mapping[str, Any], key: str, default: float | None = None, *, where: str = "") -> float:
    """`config[key]` as a number > 0; absent or null means `default`. `where` names a nested dict in the error."""
    value = _value(config, key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise SourceError(
            f"config.json: {where}{key} is {value!r}",
            why="a number above 0 is needed",
            next="compare config.json with the original repository of the model",
        )
    return float(value)


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """`config[key]` as true or false; absent or null means `default`."""
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise SourceError(
            f"config.json: {key} is {value!r}",
            why="true or false is needed",
            next="compare config.json with the original repository of the model",
        )
    return value


def source_dtype(config: Mapping[str, Any], stored: str | None) -> str:
    """The dtype of the source: `dtype` (transformers 5), else `torch_dtype`, else what the files hold (`stored`).

    Where nothing says it, float16: TensorRT-LLM's own answer to a missing dtype.
    """
    named = config.get("dtype") or config.get("torch_dtype") or stored or "float16"
    name = str(named).removeprefix("torch.")
    if name not in DTYPES:
        raise SourceError(
            f"config.json: dtype is {named!r}",
            why=f"weights are read as one of {', '.join(DTYPES)}",
            next="use the unquantized weights of the model",
        )
    return name
