"""GPTQ, as AutoGPTQ and GPTQModel write it: quantize_config.json, or quantization_config with quant_method gptq."""

from __future__ import annotations

from collections.abc import Mapping

from lpxbuild.quantization.formats import Layout
from lpxbuild.source.quantized.integers import GptqLinear
from lpxbuild.source.quantized.method import Method, choice, groups_for_tensorrt, number, refusal
from lpxbuild.source.quantized.modules import Modules
from lpxbuild.source.quantized.records import QuantizedLinear, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry

VERSIONS = {"gptq": 1, "gptq_v2": 2}
ZERO_POINTS = "it has zero points, and TensorRT-LLM's layout for them depends on the GPU that runs it"


def _read(settings: Settings, modules: Modules, tensors: Mapping[str, TensorEntry]) -> SourceQuantization:
    values = settings.values
    bits = number(settings, "bits")
    group = number(settings, "group_size", default=128)
    if bits not in (2, 4, 8):
        raise refusal(settings, f"bits is {bits}", why="lpx reads GPTQ with 2, 4 or 8 bits")
    if choice(values, "desc_act", False) is not False:
        raise refusal(
            settings,
            f"desc_act is {values['desc_act']!r}",
            why="in activation order (desc_act) the groups are no runs of input features; "
            "no layout that lpx writes has a place for their order",
            next="take a version of the model without desc_act, or the original, unquantized one",
        )
    stored = choice(values, "checkpoint_format", choice(values, "format", "gptq"))
    if stored not in VERSIONS:
        raise refusal(settings, f"checkpoint_format is {stored!r}", why=f"lpx reads {', '.join(VERSIONS)}")
    if values.get("dynamic"):
        raise refusal(settings, "dynamic gives modules settings of their own", why="lpx reads one setting for all")
    symmetric = choice(values, "sym", True) is True
    linears: dict[str, QuantizedLinear] = {}
    everything = {**modules.shapes, modules.head[0]: modules.head[1]}
    rtn = bits == 4 and symmetric
    for module, shape in everything.items():
        if f"{module}.qweight" not in tensors and f"{module}.weight" in tensors:
            continue  # left out by modules_in_block_to_quantize or lm_head
        if module == modules.head[0] and f"{module}.qweight" not in tensors:
            continue
        linears[module] = GptqLinear(
            module,
            shape,
            "int4_rtn" if rtn else None,
            group_size=max(group, 0),
            symmetric=symmetric,
            bits=bits,
            version=VERSIONS[stored],
            bias=module not in modules.biased and f"{module}.bias" in tensors,
            g_idx=f"{module}.g_idx" in tensors,
        )
    refused: dict[Layout, tuple[str, str]] = {}
    groups = {groups_for_tensorrt(max(group, 0), columns) for _, columns in modules.shapes.values()}
    if not symmetric:
        refused["tensorrt_llm"] = (ZERO_POINTS, "build for backend vllm, which loads these files as they are")
    elif bits != 4:
        refused["tensorrt_llm"] = (
            f"TensorRT-LLM has no layout for groups of {bits}-bit integers that is the same on every GPU",
            "build for backend vllm, which loads these files as they are",
        )
    elif None in groups:
        refused["tensorrt_llm"] = (
            f"its groups have {group} input features, TensorRT-LLM's W4A16_AWQ has group_size 64 and 128",
            "build for backend vllm, which loads these files as they are",
        )
    return SourceQuantization(
        method=settings.method,
        title="GPTQ",
        where=settings.where,
        linears=linears,
        unquantized=tuple(name for name in modules.shapes if name not in linears),
        group_size=min((size for size in groups if size), default=128),
        refused=refused,
    )


METHOD = Method(
    names=("gptq",),
    title="GPTQ",
    read=_read,
    table=(
        ("4 bits, symmetric, no desc_act", "`int4_rtn`: the same integers, packed anew", "unchanged", "vllm"),
        ("4 bits with zero points", "refused: zero points", "unchanged", "vllm"),
        ("2 or 8 bits", "refused", "unchanged", "vllm"),
        ("desc_act", "refused", "refused", "–"),
    ),
)
