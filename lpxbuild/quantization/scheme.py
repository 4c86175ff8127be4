"""Which format each linear layer gets: one for all, exclusions, overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import translate
from functools import cached_property
from typing import Any

from lpxbuild.errors import RecipeError

Fits = Callable[[str], bool]


def _fits(patterns: Sequence[str]) -> Fits:
    """Whether a name fits any of the patterns; those without wildcards, as sources have them, are looked up."""
    whole = {pattern for pattern in patterns if not any(sign in pattern for sign in "*?[")}
    others = "|".join(translate(pattern) for pattern in patterns if pattern not in whole)
    match = re.compile(others).match if others else None
    return lambda name: name in whole or (match is not None and match(name) is not None)


@dataclass(frozen=True)
class Scheme:
    """The recipe's `quantization`, resolved per module.

    Attributes:
        format: of every linear layer that no pattern names.
        kv_cache: "none", "int8" or "fp8".
        group_size: input features that share a scale, of the int4 group formats (NVFP4 always has 16).
        exclude: patterns of Hugging Face module names that stay unquantized.
        overrides: pattern → format; the first pattern that fits decides, and `exclude` goes before all of them.
    """

    format: str = "none"
    kv_cache: str = "none"
    group_size: int = 128
    exclude: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Any) -> Scheme:
        """From the recipe's `quantization`."""
        return cls(
            settings.format,
            settings.kv_cache,
            settings.group_size,
            tuple(settings.exclude),
            dict(settings.overrides),
        )

    def format_of(self, module: str) -> str:
        """The format of a linear layer by its Hugging Face module name ("model.layers.0.mlp.down_proj")."""
        found = self._known.get(module)
        if found is None:
            found = self._known[module] = self._decide(module)
        return found

    def _decide(self, module: str) -> str:
        if self._excluded(module):
            return "none"
        decides = next((fits for fits in self._fitting if fits(module)), None)
        return self.format if decides is None else self._fitting[decides]

    @cached_property
    def _known(self) -> dict[str, str]:
        """Formats by module as far as they were asked for: mixtures have tens of thousands, asked for many times."""
        return {}

    @cached_property
    def _excluded(self) -> Fits:
        return _fits(self.exclude)

    @cached_property
    def _fitting(self) -> dict[Fits, str]:
        return {_fits((pattern,)): name for pattern, name in self.overrides.items()}

    @property
    def formats(self) -> tuple[str, ...]:
        """Every format that some module may have, the main one first."""
        return tuple(dict.fromkeys((self.format, *self.overrides.values())))

    @property
    def needs_calibration(self) -> bool:
        """Whether text must be run through the model: formats with activation scales, and every quantized KV cache."""
        from lpxbuild.quantization.formats import FORMATS

        return self.kv_cache != "none" or any(FORMATS[name].needs_calibration for name in self.formats)

    @property
    def only_fp8_cache(self) -> bool:
        """Whether an FP8 KV cache is all that a calibration would be for."""
        from lpxbuild.quantization.formats import FORMATS

        return self.kv_cache == "fp8" and not any(FORMATS[name].needs_calibration for name in self.formats)

    @property
    def mixed(self) -> bool:
        """Whether patterns make exceptions."""
        return bool(self.exclude or self.overrides)

    def check_patterns(self, linears: Iterable[str], others: Iterable[str] = ()) -> None:
        """Refuse patterns and formats that decide nothing: a misspelt one must not pass unseen.

        What is left names formats that layers have, so `formats` and `needs_calibration` are true of the model.

        Args:
            linears: Hugging Face names of the linear layers that formats apply to.
            others: of modules that stay unquantized in any case (lm_head); to exclude them is right, if needless.

        Raises:
            RecipeError: names the pattern and the nearest layers, or the format that no layer gets.
        """
        names, plain = tuple(linears), tuple(others)
        for key, pattern in (
            *(("exclude", pattern) for pattern in self.exclude),
            *(("overrides", pattern) for pattern in self.overrides),
        ):
            fitting = (*names, *plain) if key == "exclude" else names
            if any(map(_fits((pattern,)), fitting)):
                continue
            near = get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise RecipeError(
                f"the pattern {pattern!r} of quantization.{key} fits no linear layer of the model",
                why=f"the nearest are {', '.join(near)}; embeddings, heads, norms and routers are never quantized",
                next="correct the pattern, or remove it",
            )
        if self.exclude and self.formats == ("none",):
            raise RecipeError(
                "quantization.exclude is given, but no format",
                why="quantization.format is none, so no layer is quantized",
                next="set quantization.format, or remove quantization.exclude",
            )
        self._check_shadows(names)

    def _check_shadows(self, names: Iterable[str]) -> None:
        """Refuse overrides that other patterns come before everywhere, and a main format that no layer gets."""
        left = [name for name in names if not self._excluded(name)]
        for pattern in self.overrides:
            fits = _fits((pattern,))
            rest = [name for name in left if not fits(name)]
            if len(rest) == len(left):
                raise RecipeError(
                    f"the pattern {pattern!r} of quantization.overrides decides for no layer",
                    why="quantization.exclude or an earlier pattern names all of its layers, and the first one decides",
                    next="write the narrower pattern first, or remove this one",
                )
            left = rest
        if self.format != "none" and not left:
            raise RecipeError(
                f"quantization.format {self.format} is used by no layer",
                why="quantization.exclude and quantization.overrides name every linear layer of the model",
                next="set quantization.format to none, or narrow the patterns",
            )

    def as_dict(self) -> dict[str, Any]:
        """For config.json and the manifest."""
        return {
            "format": self.format,
            "kv_cache": self.kv_cache,
            "group_size": self.group_size,
            "exclude": list(self.exclude),
            "overrides": dict(self.overrides),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Scheme:
        """The other way of `as_dict`."""
        return cls(
            data["format"], data["kv_cache"], data["group_size"], tuple(data["exclude"]), dict(data["overrides"])
        )
