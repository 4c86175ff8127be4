"""What the unified layout cannot hold, said before a weight is read."""

from __future__ import annotations

from lpxbuild.checkpoint.unified.encoding import ENCODINGS
from lpxbuild.checkpoint.unified.modules import Group, Modules, model_modules
from lpxbuild.checkpoint.unified.quant_config import NVFP4_GROUP
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.families import ModelShape
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.quantization.sizes import W4A8_GROUP

MIXED_BY_VLLM = ("fp8", "nvfp4", "w4a16_nvfp4")
"""Formats that vLLM looks for in MIXED_PRECISION; layers of any other it would take for unquantized."""

FOR_EXPERTS = {"pytorch": ("fp8", "nvfp4"), "vllm": ("fp8", "nvfp4", "w4a16_nvfp4")}
"""Formats that a backend's kernels for experts load from ModelOpt's layout. FP8 is per tensor there; TensorRT-LLM takes
every INT4 format of experts for the one with FP8 inputs."""


def check_unified(shape: ModelShape, scheme: Scheme, *, backend: str | None = None) -> None:
    """Refuse schemes that a unified checkpoint cannot express, or that the backend's loader would misread.

    Needs neither weights nor a calibration.

    Raises:
        RecipeError: names format, modules and what can be used instead.
        SourceError: sizes that the format's blocks do not divide.
    """
    if scheme.kv_cache == "int8":
        raise RecipeError(
            "quantization.kv_cache int8 has no form in a unified Hugging Face checkpoint",
            why="loaders of it (TensorRT-LLM's PyTorch backend, vLLM) read scales of FP8 KV caches only",
            next="set quantization.kv_cache to fp8 or none, or backend to tensorrt or openvino",
        )
    modules = model_modules(shape)
    names = tuple(module.name for module in modules.linears)
    scheme.check_patterns(names, modules.plain)
    used = tuple(dict.fromkeys(scheme.format_of(name) for name in names))
    for name in used:
        if name != "none" and name not in ENCODINGS:
            raise RecipeError(
                f"quantization format {name} has no form in a unified Hugging Face checkpoint",
                why=f"formats that have one: none, {', '.join(ENCODINGS)}",
                next="choose one of these, or backend tensorrt or openvino",
            )
    if "w4a8_awq" in used and scheme.group_size != W4A8_GROUP:
        raise RecipeError(
            f"quantization.group_size {scheme.group_size} does not fit w4a8_awq",
            why=f"the kernel has a scale for each {W4A8_GROUP} input features",
            next=f"set quantization.group_size to {W4A8_GROUP}",
        )
    for group in modules.groups:
        _check_group(group, scheme)
    _check_experts(modules, scheme)
    if backend in FOR_EXPERTS:
        _check_kernels(modules, scheme, backend)
    quantized = [name for name in used if name != "none"]
    if backend == "vllm":
        _check_vllm(quantized, scheme)


def _check_group(group: Group, scheme: Scheme) -> None:
    formats = {module.name: scheme.format_of(module.name) for module in group.modules}
    if len(set(formats.values())) > 1:
        listed = ", ".join(f"{module}: {name}" for module, name in formats.items())
        raise RecipeError(
            f"layers that are stacked into one matrix have different formats ({listed})",
            why="loaders of unified checkpoints join q, k, v and gate, up, which then share one format",
            next="let a pattern of quantization.exclude or quantization.overrides name all of them or none",
        )
    for module in group.modules:
        out, columns = module.shape
        name = formats[module.name]
        block = {"int4_awq": scheme.group_size, "w4a8_awq": scheme.group_size}.get(
            name, NVFP4_GROUP if "nvfp4" in name else 1
        )
        if columns % block:
            raise SourceError(
                f"{module.name} has {columns} input features, {name} needs a multiple of {block}",
                why=f"each {block} input features share a scale",
                next="choose a format without groups"
                + (", or a smaller quantization.group_size" if "awq" in name and block > 64 else ""),
            )
        if out % (2 if "awq" in name else 1):
            raise SourceError(
                f"{module.name} has {out} output features, {name} needs an even number",
                why="two rows share a byte",
                next="choose another format",
            )


def _check_experts(modules: Modules, scheme: Scheme) -> None:
    found: dict[int, dict[str, str]] = {}
    for group in modules.groups:
        if group.experts is not None:
            for module in group.modules:
                found.setdefault(group.layer, {}).setdefault(scheme.format_of(module.name), module.name)
    for layer, formats in found.items():
        if len(formats) > 1:
            listed = ", ".join(f"{module}: {name}" for name, module in formats.items())
            raise RecipeError(
                f"the experts of layer {layer} have different formats ({listed})",
                why="loaders run all experts of a layer as one kernel",
                next="let a pattern of quantization.exclude or quantization.overrides name all experts of a layer",
            )


def _check_kernels(modules: Modules, scheme: Scheme, backend: str) -> None:
    for group in modules.groups:
        name = scheme.format_of(group.modules[0].name)
        if group.experts is not None and name not in ("none", *FOR_EXPERTS[backend]):
            raise RecipeError(
                f"quantization format {name} does not fit {group.modules[0].name}, an expert, with backend {backend}",
                why=f"formats of experts that it loads: {', '.join(FOR_EXPERTS[backend])}",
                next="choose one of these, or leave the experts plain: quantization.exclude: ['*.experts.*']",
            )


def _check_vllm(quantized: list[str], scheme: Scheme) -> None:
    if not quantized and scheme.kv_cache != "none":
        raise RecipeError(
            f"quantization.kv_cache {scheme.kv_cache} without a weight format cannot be loaded by backend vllm",
            why="its ModelOpt loader wants a quant_algo for the weights",
            next="set quantization.format to fp8, or quantization.kv_cache to none",
        )
    unread = [name for name in quantized if name not in MIXED_BY_VLLM]
    if len(quantized) > 1 and unread:
        raise RecipeError(
            f"format {unread[0]} beside {quantized[0] if quantized[0] != unread[0] else quantized[1]} "
            "cannot be loaded by backend vllm",
            why=f"with several formats it knows {', '.join(MIXED_BY_VLLM)}, and takes other layers for unquantized",
            next="choose formats among these in quantization.overrides, or backend pytorch",
        )
