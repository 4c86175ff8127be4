"""Rotary embedding of a config: base and scaling, in the words TensorRT-LLM's builder understands.

Three spellings are read: top-level `rope_theta` with `rope_scaling` (transformers < 5), its older key `type`,
and `rope_parameters` holding everything (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.reading import positive_float, positive_int

SUPPORTED = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: Mapping[str, Any], default_theta: float, max_position_embeddings: int
) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of a config; scaling None means plain RoPE.

    Raises:
        SourceError: a kind that is not supported, a number that is missing, two bases that disagree.
    """
    base, scaling, parameters = spelled(config, default_theta)
    for holder in (config, parameters):
        partial = holder.get("partial_rotary_factor")
        if partial is not None and partial != 1:
            raise SourceError(
                f"config.json: partial_rotary_factor is {partial!r}",
                why="this family turns whole heads; a partial rotary embedding has no place in its layout",
                next="compare config.json with the original repository of the model",
            )
    kind = kind_of(scaling)
    if kind == "default":
        return base, None
    return base, _READERS[kind](scaling, max_position_embeddings)


def plain_rope(config: Mapping[str, Any], default_theta: float, _positions: int) -> tuple[float, None]:
    """The base alone, for classes of TensorRT-LLM that have no scaling.

    Raises:
        SourceError: the config scales RoPE.
    """
    base, scaling, _ = spelled(config, default_theta)
    kind_of(scaling, ("default",))
    return base, None


def no_rope(_config: Mapping[str, Any], default_theta: float, _positions: int) -> tuple[float, None]:
    """For families whose positions are learned."""
    return default_theta, None


def spelled(config: Mapping[str, Any], default_theta: float) -> tuple[float, dict[str, Any], dict[str, Any]]:
    """Base, `rope_scaling` in either spelling (empty = none), and `rope_parameters` as it is.

    Raises:
        SourceError: not one set of numbers, or two bases that disagree.
    """
    parameters = _mapping(config, "rope_parameters")
    scaling = _mapping(config, "rope_scaling")
    if parameters and not scaling:
        scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    return _base(config, parameters, default_theta), scaling, parameters


def _mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(inner, Mapping) for inner in value.values()):
        raise SourceError(
            f"config.json: {key} is {value!r}",
            why="one set of RoPE numbers for all layers is needed",
            next="compare config.json with the original repository of the model",
        )
    return dict(value)


def _base(config: Mapping[str, Any], parameters: Mapping[str, Any], default: float) -> float:
    bases = {
        name: positive_float(holder, "rope_theta", where=prefix)
        for name, holder, prefix in (
            ("rope_theta", config, ""),
            ("rope_parameters.rope_theta", parameters, "rope_parameters."),
        )
        if holder.get("rope_theta") is not None
    }
    if len(set(bases.values())) > 1:
        found = " and ".join(f"{name} {value:g}" for name, value in bases.items())
        raise SourceError(
            f"config.json names two RoPE bases: {found}",
            why="the weights were trained with one of them; the other gives nonsense on longer prompts",
            next="remove the wrong one from config.json",
        )
    return next(iter(bases.values()), default)


def kind_of(scaling: Mapping[str, Any], supported: tuple[str, ...] = SUPPORTED) -> str:
    """The `rope_type` of a scaling.

    Raises:
        SourceError: one that is not among the supported ones.
    """
    if not scaling:
        return "default"
    named = scaling.get("rope_type", scaling.get("type"))
    if named is None or named == "none":
        named = "default"
    if named not in supported:
        raise SourceError(
            f"config.json: rope_scaling has rope_type {named!r}, which lpx does not support",
            why=f"supported rope types: {', '.join(supported)}; left out, the model would answer nonsense",
            next="use a model with one of these, or its original config.json if this one was edited",
        )
    return str(named)


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    return positive_float(scaling, key, default, where="rope_scaling.")


def _linear(scaling: Mapping[str, Any], _max_position_embeddings: int) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": _number(scaling, "factor")}


def _llama3(scaling: Mapping[str, Any], _max_position_embeddings: int) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": _number(scaling, "factor"),
        "low_freq_factor": _number(scaling, "low_freq_factor"),
        "high_freq_factor": _number(scaling, "high_freq_factor"),
        "original_max_position_embeddings": positive_int(scaling, "original_max_position_embeddings"),
    }


def _yarn(scaling: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """Every number spelled out, because the defaults of transformers and of TensorRT-LLM differ.

    Both scale attention by (0.1·mscale·ln(factor) + 1) / (0.1·mscale_all_dim·ln(factor) + 1). transformers ignores
    `mscale` unless both are given, and knows an explicit `attention_factor`; both are expressed in `mscale` here.
    """
    factor = _number(scaling, "factor")
    if scaling.get("truncate") is False:
        raise SourceError(
            "config.json: rope_scaling has truncate false",
            why="TensorRT-LLM's yarn always rounds the correction range to whole dimensions",
            next="use a model with truncate true",
        )
    mscale, mscale_all_dim = 1.0, 0.0
    if scaling.get("attention_factor") is not None:
        attention_factor = _number(scaling, "attention_factor")
        if factor > 1:
            mscale = (attention_factor - 1.0) / (0.1 * math.log(factor))
        elif attention_factor != 1:
            raise SourceError(
                f"config.json: rope_scaling has attention_factor {attention_factor:g} with factor {factor:g}",
                why="TensorRT-LLM's yarn scales attention only with a factor above 1",
                next="compare config.json with the original repository of the model",
            )
    elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = _number(scaling, "mscale"), _number(scaling, "mscale_all_dim")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": positive_int(
            scaling, "original_max_position_embeddings", max_position_embeddings
        ),
        "beta_fast": _number(scaling, "beta_fast", 32.0),
        "beta_slow": _number(scaling, "beta_slow", 1.0),
        "mscale": mscale,
        "mscale_all_dim": mscale_all_dim,
    }


_READERS = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def long_rope_magnitude(max_position_embeddings: int, original: int) -> float:
    """Factor of cos and sin of longrope, as transformers and TensorRT-LLM compute it from the two lengths."""
    factor = max_position_embeddings / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
