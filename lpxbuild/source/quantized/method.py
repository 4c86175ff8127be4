"""The entry of a method in the registry, and what its readers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.source.quantized.modules import Modules
from lpxbuild.source.quantized.records import SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry

ORIGINAL = "give the original, unquantized model as model.source and name the format under quantization.format"
TENSORRT_GROUPS = (64, 128)
"""Group sizes that TensorRT-LLM's W4A16_AWQ has."""

Reader = Callable[[Settings, Modules, Mapping[str, TensorEntry]], SourceQuantization]


@dataclass(frozen=True)
class Method:
    """One way of quantizing that sources come with.

    Attributes:
        title: for messages and the docs.
        names: as `quant_method` has them.
        read: the reader; raises SourceError for kinds that are not read.
        reasons: names that are refused, and why.
        table: rows of the docs: (kind, TensorRT-LLM layout, unified layout, engines that load the files as they are).
    """

    title: str
    names: tuple[str, ...] = ()
    read: Reader | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    table: tuple[tuple[str, str, str, str], ...] = ()


def refusal(settings: Settings, what: str, *, why: str, next: str = ORIGINAL) -> SourceError:
    """The error for a quantized source that is not read."""
    return SourceError(
        f"the source is already quantized: {settings.where}, method {settings.method}; {what}", why=why, next=next
    )


def number(settings: Settings, *keys: str, default: int | None = None) -> int:
    """A whole number under the first key that is there.

    Raises:
        SourceError: absent without a default, or no whole number.
    """
    for key in keys:
        value = settings.values.get(key)
        if value is not None:
            if type(value) is not int:
                raise refusal(settings, f"{key} is {value!r}", why="a whole number is needed")
            return value
    if default is None:
        raise refusal(settings, f"{keys[0]} is not given", why="the layout of the weights depends on it")
    return default


def names(settings: Settings, *keys: str) -> tuple[str, ...]:
    """A list of module names under the first key that has one; null counts as none."""
    for key in keys:
        value = settings.values.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise refusal(settings, f"{key} is {value!r}", why="a list of module names is needed")
        return tuple(value)
    return ()


def choice(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """A value, null counting as absent."""
    value = values.get(key)
    return default if value is None else value


def groups_for_tensorrt(group_size: int, columns: int) -> int | None:
    """The group size to write for groups of `group_size` (0 = whole rows): a divisor of it that TensorRT-LLM has and
    that divides the input, so that each scale is only repeated; None where there is none."""
    whole = group_size or columns
    return next((size for size in reversed(TENSORRT_GROUPS) if whole % size == 0 and columns % size == 0), None)
