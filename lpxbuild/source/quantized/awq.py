"""AutoAWQ: quant_config.json (w_bit, q_group_size), or quantization_config with quant_method awq."""

from __future__ import annotations

from collections.abc import Mapping

from lpxbuild.source.quantized.gptq import ZERO_POINTS
from lpxbuild.source.quantized.integers import AwqLinear
from lpxbuild.source.quantized.method import Method, choice, names, number, refusal
from lpxbuild.source.quantized.modules import Modules, containing
from lpxbuild.source.quantized.records import QuantizedLinear, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry


def _read(settings: Settings, modules: Modules, tensors: Mapping[str, TensorEntry]) -> SourceQuantization:
    bits = number(settings, "bits", "w_bit")
    group = number(settings, "group_size", "q_group_size", default=128)
    version = str(choice(settings.values, "version", "gemm")).lower()
    if bits != 4:
        raise refusal(settings, f"bits is {bits}", why="AutoAWQ has 4 bits")
    if version != "gemm":
        raise refusal(
            settings,
            f"version is {version}",
            why="its words are ordered for one kernel; engines load version gemm",
            next="take a version of the model that AutoAWQ saved as gemm, or the original, unquantized one",
        )
    left_out = names(settings, "modules_to_not_convert")
    linears: dict[str, QuantizedLinear] = {
        module: AwqLinear(module, shape, None, group_size=max(group, 0))
        for module, shape in modules.shapes.items()
        if not containing(module, left_out)
    }
    return SourceQuantization(
        method=settings.method,
        title="AutoAWQ",
        where=settings.where,
        linears=linears,
        unquantized=tuple(name for name in modules.shapes if name not in linears),
        group_size=max(group, 0) or 128,
        refused={"tensorrt_llm": (ZERO_POINTS, "build for backend vllm, which loads these files as they are")},
    )


METHOD = Method(
    names=("awq",),
    title="AutoAWQ",
    read=_read,
    table=(
        ("gemm", "refused: zero points", "unchanged", "vllm"),
        ("gemv and others", "refused", "refused", "–"),
    ),
)
