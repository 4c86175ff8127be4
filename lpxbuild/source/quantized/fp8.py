"""quant_method fp8: scales for blocks (DeepSeek-V3, Qwen3-FP8) or one for each matrix (AutoFP8)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.quantization.formats import Layout
from lpxbuild.source.quantized.linears import BlockFp8Linear, Fp8Linear
from lpxbuild.source.quantized.method import Method, choice, names, refusal
from lpxbuild.source.quantized.modules import Modules, named_by
from lpxbuild.source.quantized.records import QuantizedLinear, SourceQuantization
from lpxbuild.source.quantized.settings import Settings
from lpxbuild.source.records import TensorEntry

BLOCKS = (
    "its scales stand for blocks of rows and columns, which TensorRT-LLM's engines know for DeepSeek only",
    "build for backend pytorch or vllm, which load these files as they are",
)


def block_of(value: Any) -> tuple[int, int] | None:
    """A pair of sizes above 0, None for anything else."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    return None


def _read(settings: Settings, modules: Modules, tensors: Mapping[str, TensorEntry]) -> SourceQuantization:
    values = settings.values
    activation = choice(values, "activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise refusal(settings, f"activation_scheme is {activation!r}", why="dynamic and static are known")
    left_out = names(settings, "modules_to_not_convert", "ignored_layers")
    kept = {module: size for module, size in modules.shapes.items() if not named_by(module, left_out)}
    refused: dict[Layout, tuple[str, str]] = {}
    linears: dict[str, QuantizedLinear] = {}
    if values.get("weight_block_size") is not None:
        block = block_of(values["weight_block_size"])
        if block is None:
            raise refusal(
                settings, f"weight_block_size is {values['weight_block_size']!r}", why="two whole numbers are needed"
            )
        linears = {module: BlockFp8Linear(module, size, None, block) for module, size in kept.items()}
        refused["tensorrt_llm"] = BLOCKS
        loaders: tuple[str, ...] = ("pytorch", "vllm") if block == (128, 128) else ("vllm",)
    else:
        static = activation == "static"
        name = "fp8" if static else "fp8_pc_pt"
        linears = {module: Fp8Linear(module, size, name, static_input=static) for module, size in kept.items()}
        loaders = ("vllm",)
    return SourceQuantization(
        method=settings.method,
        title="FP8",
        where=settings.where,
        linears=linears,
        unquantized=tuple(name for name in modules.shapes if name not in linears),
        refused=refused,
        loaders=loaders,
    )


METHOD = Method(
    names=("fp8",),
    title="FP8",
    read=_read,
    table=(
        ("blocks (weight_block_size)", "refused: blocks", "unchanged", "pytorch (128 × 128), vllm"),
        ("one scale per matrix, static", "`fp8`: q, k, v brought to the largest scale", "unchanged", "vllm"),
        ("one scale per matrix, dynamic", "`fp8_pc_pt`: the scale repeated for each row", "unchanged", "vllm"),
    ),
)
