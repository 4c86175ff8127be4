"""NVIDIA ModelOpt's unified Hugging Face checkpoints (`export_hf_checkpoint`).

hf_quant_config.json says the algorithm, the modules left out and the KV cache; beside each weight lie `weight_scale`
and, by algorithm, `weight_scale_2`, `input_scale` and `pre_quant_scale`. Facts: exports of ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lpxbuild.quantization.formats import Layout
from lpxbuild.source.quantized.integers import RowPairLinear
from lpxbuild.source.quantized.linears import Fp4Linear, Fp8Linear, Int8Linear
from lpxbuild.source.quantized.method import Method, choice, names, refusal
from lpxbuild.source.quantized.modules import Modules, named_by
from lpxbuild.source.quantized.records import QuantizedLinear, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry

Build = Callable[[str, tuple[int, int], int, bool], QuantizedLinear]
"""(module, (out, in), group size, whether a pre_quant_scale is stored) → the linear."""

ALGORITHMS: Mapping[str, tuple[Build, tuple[str, ...]]] = {
    "FP8": (
        lambda module, shape, _group, _smoothed: Fp8Linear(module, shape, "fp8", static_input=True),
        ("pytorch", "vllm"),
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        lambda module, shape, _group, _smoothed: Fp8Linear(module, shape, "fp8_pc_pt", per_row=True),
        ("pytorch", "vllm"),
    ),
    "NVFP4": (lambda module, shape, _group, _smoothed: Fp4Linear(module, shape, "nvfp4"), ("pytorch", "vllm")),
    "W4A16_NVFP4": (
        lambda module, shape, _group, _smoothed: Fp4Linear(module, shape, "w4a16_nvfp4", static_input=False),
        ("vllm",),
    ),
    "W4A16_AWQ": (
        lambda module, shape, group, smoothed: RowPairLinear(module, shape, "int4_awq", group, smoothed=smoothed),
        ("pytorch",),
    ),
    "W4A8_AWQ": (
        lambda module, shape, group, smoothed: RowPairLinear(
            module, shape, "w4a8_awq", group, smoothed=smoothed, second_scale=True
        ),
        ("pytorch",),
    ),
    "W8A16": (lambda module, shape, _group, _smoothed: Int8Linear(module, shape, None), ()),
    "W8A8_SQ_PER_CHANNEL": (
        lambda module, shape, _group, smoothed: Int8Linear(module, shape, None, smoothed=smoothed, static_input=True),
        (),
    ),
}
"""Algorithm → how a linear is stored, and the engines that load it."""


def _read(settings: Settings, modules: Modules, tensors: Mapping[str, TensorEntry]) -> SourceQuantization:
    main = settings.values.get("quant_algo")
    mixed = main == "MIXED_PRECISION"
    layers = settings.values.get("quantized_layers") if mixed else None
    if mixed and not isinstance(layers, Mapping):
        raise refusal(
            settings, "quant_algo is MIXED_PRECISION, but no quantized_layers", why="each layer's algorithm is needed"
        )
    left_out = names(settings, "exclude_modules", "ignore")
    group = choice(settings.values, "group_size", None)
    linears: dict[str, QuantizedLinear] = {}
    loaders = {"pytorch", "vllm"}
    for module, shape in {**modules.shapes, modules.head[0]: modules.head[1]}.items():
        own = _own(layers.get(module)) if isinstance(layers, Mapping) else {"quant_algo": main}
        if not own or named_by(module, left_out):
            continue
        if module == modules.head[0] and f"{module}.weight_scale" not in tensors:
            continue  # a head is only quantized where its tensors say so: older lists do not name it
        algorithm = str(own.get("quant_algo"))
        if algorithm not in ALGORITHMS:
            raise refusal(
                settings,
                f"quant_algo {algorithm} of {module}",
                why=f"of ModelOpt, lpx reads {', '.join(ALGORITHMS)}",
            )
        build, loading = ALGORITHMS[algorithm]
        loaders &= set(loading)
        size = own.get("group_size") or group or _stored_group(module, shape, tensors)
        linears[module] = build(module, shape, size, f"{module}.pre_quant_scale" in tensors)
    return _whole(settings, modules, linears, tuple(sorted(loaders)))


def _whole(
    settings: Settings, modules: Modules, linears: dict[str, QuantizedLinear], loaders: tuple[str, ...]
) -> SourceQuantization:
    kv_cache, key_value = _key_value(settings, modules)
    refused: dict[Layout, tuple[str, str]] = {}
    if kv_cache not in ("none", "fp8"):
        refused["tensorrt_llm"] = (
            f"its KV cache is quantized to {kv_cache}, which TensorRT-LLM checkpoints cannot say",
            "build for backend pytorch or vllm",
        )
        kv_cache = "none"
    groups = {one.group_size for one in linears.values() if isinstance(one, RowPairLinear)}
    if len(groups) > 1:
        refused["tensorrt_llm"] = (f"its layers have groups of {sorted(groups)}", "build for backend pytorch")
    return SourceQuantization(
        method="modelopt",
        title="NVIDIA ModelOpt",
        where=settings.where,
        linears=_one_awq(linears),
        unquantized=tuple(name for name in modules.shapes if name not in linears),
        group_size=min(groups) if groups else 128,
        kv_cache=kv_cache,
        key_value_scales=key_value,
        refused=refused,
        loaders=loaders,
    )


def _own(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _stored_group(module: str, shape: tuple[int, int], tensors: Mapping[str, TensorEntry]) -> int:
    """config.json of ModelOpt names no group size for AWQ: the scales' columns tell it."""
    entry = tensors.get(f"{module}.weight_scale")
    if entry is not None and len(entry.shape) == 2 and 0 < entry.shape[1] <= shape[1]:
        return shape[1] // entry.shape[1]
    return 128


def _one_awq(linears: dict[str, QuantizedLinear]) -> dict[str, QuantizedLinear]:
    """Where no linear has a factor of its input, the format is the one without: nothing is to be multiplied."""
    awq = [one for one in linears.values() if isinstance(one, RowPairLinear) and one.format == "int4_awq"]
    if not awq or any(one.smoothed for one in awq):
        return linears
    return {name: replace(one, format="int4_rtn") if one in awq else one for name, one in linears.items()}


def _key_value(settings: Settings, modules: Modules) -> tuple[str, dict[str, tuple[str, str]]]:
    algorithm = settings.values.get("kv_cache_quant_algo")
    scheme = settings.values.get("kv_cache_scheme")
    if algorithm is None and isinstance(scheme, Mapping):
        algorithm = "FP8" if scheme.get("num_bits") == 8 and scheme.get("type") == "float" else "NVFP4"
    if algorithm is None:
        return "none", {}
    # The scales carry the names of separate projections also where the model has one fused.
    found = {name: (f"{name}.k_proj.k_scale", f"{name}.v_proj.v_scale") for name in modules.attention}
    return str(algorithm).lower(), found


METHOD = Method(
    names=("modelopt",),
    title="NVIDIA ModelOpt",
    read=_read,
    table=(
        (
            "FP8, with FP8 KV cache or without",
            "`fp8`: q, k, v brought to the largest scale",
            "unchanged",
            "pytorch, vllm",
        ),
        ("FP8_PER_CHANNEL_PER_TOKEN", "`fp8_pc_pt`", "unchanged", "pytorch, vllm"),
        ("NVFP4", "`nvfp4`", "unchanged", "pytorch, vllm"),
        ("W4A16_NVFP4", "`w4a16_nvfp4`, for backend openvino; refused for tensorrt", "unchanged", "vllm"),
        ("W4A16_AWQ", "`int4_awq`", "unchanged", "pytorch"),
        ("W4A8_AWQ", "`w4a8_awq`", "unchanged", "pytorch"),
        ("W8A16, W8A8_SQ_PER_CHANNEL", "refused", "refused", "none known"),
        ("MIXED_PRECISION of these", "each layer by its own rule", "unchanged", "those that load every part"),
    ),
)
