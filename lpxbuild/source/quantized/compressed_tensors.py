"""compressed-tensors, as llm-compressor writes it: quantization_config with config_groups, targets and an ignore list.

Facts: compressed_tensors/quantization (QuantizationArgs, QuantizationConfig) and its compressors, 0.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lpxbuild.quantization.formats import Layout
from lpxbuild.source.quantized.fp8 import BLOCKS, block_of
from lpxbuild.source.quantized.gptq import ZERO_POINTS
from lpxbuild.source.quantized.integers import PackedLinear
from lpxbuild.source.quantized.linears import BlockFp8Linear, Fp4Linear, Fp8Linear, Int8Linear
from lpxbuild.source.quantized.method import Method, choice, groups_for_tensorrt, names, refusal
from lpxbuild.source.quantized.modules import Modules, matched_by
from lpxbuild.source.quantized.records import QuantizedLinear, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry

VLLM = "build for backend vllm, which loads these files as they are"
SYMMETRIC_ROWS = "its activations are 8-bit integers without smoothing, which TensorRT-LLM checkpoints cannot say"


@dataclass(frozen=True)
class _Group:
    """One of config_groups: whom it is for, and how weights and inputs are quantized (None = not)."""

    targets: tuple[str, ...]
    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    packed: bool

    @property
    def kind(self) -> str:
        """What decides how a weight is stored: "float8", "int4" …"""
        return f"{choice(self.weights, 'type', 'int')}{choice(self.weights, 'num_bits', 8)}"

    @property
    def dynamic(self) -> bool:
        """Whether scales of the inputs are found while the model runs."""
        return self.inputs is not None and choice(self.inputs, "dynamic", False) is True


def _groups(settings: Settings) -> list[_Group]:
    values = settings.values.get("config_groups")
    if not isinstance(values, Mapping) or not values:
        raise refusal(settings, "config_groups is not given", why="it says how the weights are stored")
    groups = []
    for name, group in values.items():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            raise refusal(settings, f"config_groups.{name} has no weights", why="it says how the weights are stored")
        targets, inputs = choice(group, "targets", ["Linear"]), group.get("input_activations")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise refusal(settings, f"config_groups.{name}.targets is {targets!r}", why="a list of names is needed")
        stored = choice(group, "format", choice(settings.values, "format", "dense"))
        groups.append(
            _Group(
                tuple(targets),
                group["weights"],
                inputs if isinstance(inputs, Mapping) else None,
                packed="pack-quantized" in str(stored),
            )
        )
    return groups


def _read(settings: Settings, modules: Modules, tensors: Mapping[str, TensorEntry]) -> SourceQuantization:
    _check_whole(settings)
    groups = _groups(settings)
    ignored = names(settings, "ignore")
    linears: dict[str, QuantizedLinear] = {}
    refused: dict[Layout, tuple[str, str]] = {}
    notices: dict[str, None] = {}
    sizes: set[int] = set()
    for module, shape in {**modules.shapes, modules.head[0]: modules.head[1]}.items():
        kind = "Conv1D" if module in modules.transposed else "Linear"
        if matched_by(module, ignored, kind):
            continue
        if module == modules.head[0] and modules.tied:
            continue  # the embedding serves as head, and has no scales of its own
        group = max(groups, key=lambda one: matched_by(module, one.targets, kind))
        if not matched_by(module, group.targets, kind):
            continue
        linear, why, notice = _linear(settings, module, shape, group, tensors)
        linears[module] = linear
        if why is not None:
            refused["tensorrt_llm"] = why
        if notice:
            notices[notice] = None
        if isinstance(linear, PackedLinear) and linear.format is not None:
            size = groups_for_tensorrt(linear.group_size, shape[1])
            if size is None:
                refused["tensorrt_llm"] = (
                    f"{module} has groups of {linear.group_size or shape[1]} of its {shape[1]} input features, "
                    "TensorRT-LLM's W4A16_AWQ has group_size 64 and 128",
                    VLLM,
                )
            else:
                sizes.add(size)
    kv_cache, key_value = _key_value(settings, modules)
    return SourceQuantization(
        method=settings.method,
        title="compressed-tensors",
        where=settings.where,
        linears=linears,
        unquantized=tuple(name for name in modules.shapes if name not in linears),
        group_size=min(sizes, default=128),
        kv_cache=kv_cache,
        key_value_scales=key_value,
        refused=refused,
        notices=tuple(notices),
    )


def _check_whole(settings: Settings) -> None:
    sparsity = settings.values.get("sparsity_config")
    if isinstance(sparsity, Mapping) and choice(sparsity, "format", "dense") != "dense":
        raise refusal(
            settings, f"sparsity_config has format {sparsity['format']}", why="lpx reads dense weights, not sparse ones"
        )
    if settings.values.get("transform_config"):
        raise refusal(
            settings, "it has a transform_config", why="rotations of the inputs have no place in what lpx writes"
        )


Found = tuple[QuantizedLinear, "tuple[str, str] | None", str]
"""A linear; why TensorRT-LLM's layout cannot have it; what to tell the user."""


def _linear(
    settings: Settings, module: str, shape: tuple[int, int], group: _Group, tensors: Mapping[str, TensorEntry]
) -> Found:
    readers = {"float8": _float8, "float4": _float4, "int4": _int4, "int8": _int8}
    reader = readers.get(group.kind)
    if reader is None:
        raise refusal(settings, f"{module} has weights of type {group.kind}", why=f"lpx reads {', '.join(readers)}")
    return reader(settings, module, shape, group, tensors)


def _float8(
    settings: Settings, module: str, shape: tuple[int, int], group: _Group, tensors: Mapping[str, TensorEntry]
) -> Found:
    if group.weights.get("strategy") == "block":
        block = block_of(group.weights.get("block_structure"))
        if block is None:
            raise refusal(settings, "strategy is block without a block_structure", why="the blocks' size is needed")
        return BlockFp8Linear(module, shape, None, block, "weight_scale"), BLOCKS, ""
    entry = tensors.get(f"{module}.weight_scale")
    per_row = entry is not None and shape[0] > 1 and entry.shape[:1] == (shape[0],)
    strategy = choice(group.weights, "strategy", "channel" if per_row else "tensor")
    if strategy not in ("tensor", "channel"):
        raise refusal(settings, f"FP8 weights with strategy {strategy}", why="lpx reads tensor, channel and block")
    per_row = strategy == "channel"
    if group.inputs is None:
        why = ("its weights are FP8 and its inputs are not, which TensorRT-LLM checkpoints cannot say", VLLM)
        return Fp8Linear(module, shape, None, per_row), why, ""
    static = not group.dynamic
    if static and not per_row:
        return Fp8Linear(module, shape, "fp8", per_row, static_input=True), None, ""
    notice = ""
    if static:
        notice = (
            "the source has one scale for each output row and a fixed one for the inputs; in the TensorRT-LLM layout "
            "the inputs' scales are found for each token while the model runs, and the fixed ones are left out"
        )
    return Fp8Linear(module, shape, "fp8_pc_pt", per_row, static_input=static), None, notice


def _float4(
    settings: Settings, module: str, shape: tuple[int, int], group: _Group, _tensors: Mapping[str, TensorEntry]
) -> Found:
    if group.weights.get("strategy") != "tensor_group" or group.weights.get("group_size") != 16:
        raise refusal(settings, f"FP4 weights of {module} are not NVFP4", why="groups of 16 in tensor_group are read")
    static = group.inputs is not None
    linear = Fp4Linear(
        module,
        shape,
        "nvfp4" if static else "w4a16_nvfp4",
        static_input=static,
        packed="weight_packed",
        global_scale="weight_global_scale",
        input_global_scale="input_global_scale",
        inverse=True,
    )
    return linear, None, ""


def _int4(
    settings: Settings, module: str, shape: tuple[int, int], group: _Group, tensors: Mapping[str, TensorEntry]
) -> Found:
    return _packed(settings, module, shape, group, tensors, bits=4)


def _int8(
    settings: Settings, module: str, shape: tuple[int, int], group: _Group, tensors: Mapping[str, TensorEntry]
) -> Found:
    if group.packed:
        return _packed(settings, module, shape, group, tensors, bits=8)
    if choice(group.weights, "symmetric", True) is not True:
        raise refusal(settings, f"int8 weights of {module} have zero points", why="lpx reads symmetric ones")
    static = group.inputs is not None and not group.dynamic
    return Int8Linear(module, shape, None, static_input=static), (SYMMETRIC_ROWS, VLLM), ""


def _packed(
    settings: Settings,
    module: str,
    shape: tuple[int, int],
    group: _Group,
    tensors: Mapping[str, TensorEntry],
    *,
    bits: int,
) -> Found:
    if group.inputs is not None:
        raise refusal(
            settings,
            f"{module} has {bits}-bit weights and quantized inputs",
            why="of packed weights, lpx reads those with plain inputs (w4a16, w8a16)",
        )
    if f"{module}.weight_g_idx" in tensors or group.weights.get("actorder") in ("group", "dynamic", True):
        raise refusal(
            settings,
            f"actorder is {group.weights.get('actorder')!r}",
            why="in activation order (desc_act) the groups are no runs of input features; "
            "no layout that lpx writes has a place for their order",
            next="take a version of the model with actorder weight or none, or the original, unquantized one",
        )
    size = choice(group.weights, "group_size", -1)
    if type(size) is not int:
        raise refusal(settings, f"group_size is {size!r}", why="a whole number is needed")
    symmetric = choice(group.weights, "symmetric", True) is True
    rtn = bits == 4 and symmetric
    linear = PackedLinear(
        module, shape, "int4_rtn" if rtn else None, group_size=max(size, 0), symmetric=symmetric, bits=bits
    )
    if not symmetric:
        return linear, (ZERO_POINTS, VLLM), ""
    if bits != 4:
        return (
            linear,
            ("TensorRT-LLM has no layout for groups of 8-bit integers that is the same on every GPU", VLLM),
            "",
        )
    return linear, None, ""


def _key_value(settings: Settings, modules: Modules) -> tuple[str, dict[str, tuple[str, str]]]:
    scheme = settings.values.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return "none", {}
    if choice(scheme, "num_bits", 8) != 8 or scheme.get("type") != "float" or choice(scheme, "dynamic", False):
        raise refusal(settings, f"kv_cache_scheme is {dict(scheme)}", why="lpx reads a KV cache of static 8-bit floats")
    return "fp8", {name: (f"{name}.k_scale", f"{name}.v_scale") for name in modules.attention}


METHOD = Method(
    names=("compressed-tensors",),
    title="compressed-tensors",
    read=_read,
    table=(
        (
            "FP8, one scale per matrix, static inputs",
            "`fp8`: q, k, v brought to the largest scale",
            "unchanged",
            "vllm",
        ),
        ("FP8, one scale per matrix or per row, dynamic inputs", "`fp8_pc_pt`", "unchanged", "vllm"),
        ("FP8, one scale per row, static inputs", "`fp8_pc_pt`, inputs scaled per token (notice)", "unchanged", "vllm"),
        ("FP8 weights, plain inputs; FP8 blocks", "refused", "unchanged", "vllm"),
        ("w4a16 symmetric, groups or rows", "`int4_rtn`: the same integers, packed anew", "unchanged", "vllm"),
        ("w4a16 with zero points; w8a16", "refused", "unchanged", "vllm"),
        ("int8 w8a8", "refused", "unchanged", "vllm"),
        ("NVFP4, NVFP4 with plain inputs", "`nvfp4`; `w4a16_nvfp4`, for backend openvino only", "unchanged", "vllm"),
        ("actorder group, sparse weights, transforms", "refused", "refused", "–"),
    ),
)
