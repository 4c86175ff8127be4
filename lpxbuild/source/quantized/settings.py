"""Where a Hugging Face folder says that its weights are quantized, and by which method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.source.folder import CONFIG, QUANTIZATION_FILES, read_json

KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Settings:
    """What the folder says.

    Attributes:
        method: lower case, "modelopt", "gptq" …; "unknown" where nothing names one.
        values: the settings themselves.
        where: file and key they come from, for messages.
    """

    method: str
    values: Mapping[str, Any]
    where: str


def quantization_settings(path: Path, config: Mapping[str, Any]) -> Settings | None:
    """The settings of a folder whose weights are quantized, None for plain weights.

    config.json decides. Of ModelOpt, hf_quant_config.json says more than config.json (group sizes), so it is taken
    where both are there; files of their own count alone where config.json is silent (early GPTQ, AWQ and ModelOpt).
    """
    for key in KEYS:
        values = config.get(key)
        if isinstance(values, Mapping) and values:
            found = Settings(_method(values), values, f"{CONFIG} has a {key}")
            return _modelopt_file(path, values) or found if found.method == "modelopt" else found
        if values:
            return Settings("unknown", {}, f"{CONFIG} has a {key} that is no object")
    for name in QUANTIZATION_FILES:
        if (path / name).is_file():
            values = read_json(path / name)
            if "quantization" in values:
                return _modelopt_file(path, {})
            return Settings(_method(values), values, f"the folder has {name}")
    return None


def _modelopt_file(path: Path, beside: Mapping[str, Any]) -> Settings | None:
    name = QUANTIZATION_FILES[0]
    if not (path / name).is_file():
        return None
    values = read_json(path / name).get("quantization")
    if not isinstance(values, dict):
        return None
    return Settings("modelopt", {**beside, **values}, f"the folder has {name}")


def _method(values: Mapping[str, Any]) -> str:
    for key in ("quant_method", "quant_library"):
        if values.get(key):
            return str(values[key]).lower()
    if values.get("quant_algo"):
        return "modelopt"
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    if "config_groups" in values:
        return "compressed-tensors"
    if "w_bit" in values or {"version", "bits"} <= values.keys():
        return "awq"
    return "gptq" if "bits" in values else "unknown"
