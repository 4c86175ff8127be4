"""hf_quant_config.json, and `quantization_config` in config.json: how loaders learn what the tensors are.

Both say the same; TensorRT-LLM reads the first, vLLM either. The forms are those of NVIDIA ModelOpt's export.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild import __version__
from lpxbuild.checkpoint.unified.modules import Modules
from lpxbuild.quantization import FORMATS, KV_CACHE
from lpxbuild.quantization.scheme import Scheme

NVFP4_GROUP = 16
_STATIC8 = {"dynamic": False, "num_bits": 8, "type": "float"}
_STATIC4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": NVFP4_GROUP}
PRODUCER = {"name": "lpx", "version": __version__}


def layer_settings(name: str, group_size: int) -> dict[str, Any]:
    """What a quantized layer's entry says: the algorithm, and its groups where it has some."""
    algorithm = FORMATS[name].quant_algo
    if name in ("int4_awq", "w4a8_awq"):
        return {
            "quant_algo": algorithm,
            "group_size": group_size,
            "has_zero_point": False,
            "pre_quant_scale": True,
        }
    if name in ("nvfp4", "w4a16_nvfp4"):
        return {"quant_algo": algorithm, "group_size": NVFP4_GROUP}
    return {"quant_algo": algorithm}


def hf_quant_config(scheme: Scheme, modules: Modules) -> dict[str, Any] | None:
    """hf_quant_config.json; None where neither weights nor KV cache are quantized.

    With one format, everything else is listed by its full name in `exclude_modules`; with several, each quantized
    layer is listed with its own (`quant_algo` MIXED_PRECISION).
    """
    formats = {module.name: scheme.format_of(module.name) for module in modules.linears}
    used = tuple(dict.fromkeys(name for name in formats.values() if name != "none"))
    kv_cache = KV_CACHE[scheme.kv_cache]
    if not used and kv_cache is None:
        return None
    settings: dict[str, Any] = {"quant_algo": None, "kv_cache_quant_algo": kv_cache}
    if len(used) > 1:
        settings["quant_algo"] = "MIXED_PRECISION"
        settings["quantized_layers"] = {
            module: layer_settings(name, scheme.group_size) for module, name in formats.items() if name != "none"
        }
    elif used:
        settings.update(layer_settings(used[0], scheme.group_size))
        settings["exclude_modules"] = sorted(
            {*modules.plain, *(module for module, name in formats.items() if name == "none")}
        )
    else:
        settings["quantized_layers"] = {}
    return {"producer": PRODUCER, "quantization": settings}


def quantization_config(quant_config: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config` of config.json from hf_quant_config.json: the same in the words of compressed-tensors."""
    settings = quant_config["quantization"]
    algorithm = settings["quant_algo"]
    found: dict[str, Any] = {}
    if algorithm == "MIXED_PRECISION":
        layers = settings["quantized_layers"]
        groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for module, entry in layers.items():
            groups.setdefault(tuple(sorted(entry.items())), []).append(module)
        found["config_groups"] = {
            f"group_{number}": {**_group(dict(entry)), "targets": sorted(names)}
            for number, (entry, names) in enumerate(groups.items())
        }
        found["quantized_layers"] = layers
    elif algorithm in ("FP8", "NVFP4", "W4A16_NVFP4"):
        found["config_groups"] = {"group_0": {**_group(settings), "targets": ["Linear"]}}
    found["ignore"] = settings.get("exclude_modules", [])
    if algorithm is not None:
        found["quant_algo"] = algorithm
    if settings["kv_cache_quant_algo"] == "FP8":
        found["kv_cache_scheme"] = dict(_STATIC8)
    return {**found, "producer": quant_config["producer"], "quant_method": "modelopt"}


def _group(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Activations and weights of one kind of layer."""
    size = entry.get("group_size")
    forms: dict[str, dict[str, Any]] = {
        "FP8": {"input_activations": dict(_STATIC8), "weights": dict(_STATIC8)},
        "FP8_PER_CHANNEL_PER_TOKEN": {
            "input_activations": dict(_STATIC8),
            "weights": {**_STATIC8, "strategy": "channel"},
        },
        "W8A8_SQ_PER_CHANNEL": {
            "input_activations": {**_STATIC8, "type": "int"},
            "weights": {**_STATIC8, "type": "int", "strategy": "channel"},
        },
        "W4A16_AWQ": {"weights": {"dynamic": False, "num_bits": 4, "type": "int", "group_size": size}},
        "W4A8_AWQ": {
            "input_activations": {**_STATIC8, "group_size": size},
            "weights": {**_STATIC4, "group_size": size},
        },
        "NVFP4": {"input_activations": dict(_STATIC4), "weights": dict(_STATIC4)},
        "W4A16_NVFP4": {"weights": dict(_STATIC4)},
    }
    return forms[entry["quant_algo"]]
