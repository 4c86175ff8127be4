"""The closed list of quantization formats: one row each, named as ModelOpt's and TensorRT-LLM's `qformat`.

Recipe checks, refusals and the table in the docs read this list.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from lpxbuild.errors import RecipeError

Layout = Literal["tensorrt_llm", "unified_hf"]


@dataclass(frozen=True)
class Format:
    """One quantization format.

    Args:
        name: as recipes write it.
        quant_algo: TensorRT-LLM's QuantAlgo; None = not quantized.
        bits: bits of a stored weight.
        layouts: checkpoint layouts that can carry it.
        backends: backends that can execute it.
        lowest_sm: lowest compute capability of an NVIDIA GPU that runs it (80 = Ampere).
        needs_calibration: text must be run through the model to find its scales.
        executable: this version of lpx can build it.
        refused_sm: compute capabilities that TensorRT-LLM's engine builder refuses (first, last).
    """

    name: str
    quant_algo: str | None
    bits: int
    layouts: tuple[Layout, ...]
    backends: tuple[str, ...]
    lowest_sm: int
    needs_calibration: bool
    executable: bool = False
    refused_sm: tuple[int, int] | None = None


_TRT: tuple[Layout, ...] = ("tensorrt_llm",)
_BOTH: tuple[Layout, ...] = ("tensorrt_llm", "unified_hf")
_BLACKWELL_DATACENTER = (100, 119)

FORMATS = MappingProxyType(
    {
        row.name: row
        for row in (
            Format("none", None, 16, _BOTH, ("tensorrt", "pytorch", "vllm", "openvino"), 80, False, True),
            Format("int8_wo", "W8A16", 8, _TRT, ("tensorrt", "openvino"), 80, False, True, _BLACKWELL_DATACENTER),
            Format("int4_wo", "W4A16", 4, _TRT, ("tensorrt", "openvino"), 80, False, True, _BLACKWELL_DATACENTER),
            Format("int4_rtn", "W4A16_AWQ", 4, _TRT, ("tensorrt",), 80, False, False, _BLACKWELL_DATACENTER),
            Format(
                "int4_awq",
                "W4A16_AWQ",
                4,
                _BOTH,
                ("tensorrt", "pytorch", "vllm"),
                80,
                True,
                refused_sm=_BLACKWELL_DATACENTER,
            ),
            Format(
                "w4a8_awq", "W4A8_AWQ", 4, _BOTH, ("tensorrt", "pytorch"), 89, True, refused_sm=_BLACKWELL_DATACENTER
            ),
            Format(
                "int8_sq", "W8A8_SQ_PER_CHANNEL", 8, _TRT, ("tensorrt",), 80, True, refused_sm=_BLACKWELL_DATACENTER
            ),
            Format("fp8", "FP8", 8, _BOTH, ("tensorrt", "pytorch", "vllm"), 89, True),
            Format(
                "fp8_pc_pt",
                "FP8_PER_CHANNEL_PER_TOKEN",
                8,
                _BOTH,
                ("tensorrt", "pytorch"),
                89,
                False,
                refused_sm=_BLACKWELL_DATACENTER,
            ),
            Format("nvfp4", "NVFP4", 4, _BOTH, ("tensorrt", "pytorch", "vllm"), 100, True),
            Format("w4a16_nvfp4", "W4A16_NVFP4", 4, ("unified_hf",), ("pytorch", "vllm"), 80, False),
        )
    }
)
"""All formats by name, in the order of the docs. Facts of NVIDIA's support matrix; backends other than `openvino`
are taken from sources, not from runs."""

KV_CACHE = MappingProxyType({"none": None, "int8": "INT8", "fp8": "FP8"})
"""KV-cache formats → TensorRT-LLM's kv_cache_quant_algo."""


def format_for(name: str, *, backend: str | None = None) -> Format:
    """The row of a format that this version can build, for `backend` if one is given.

    Raises:
        RecipeError: unknown, not built by this version, or not executed by the backend; names what can be used.
    """
    usable = [row.name for row in FORMATS.values() if row.executable and (backend is None or backend in row.backends)]
    for_backend = f" with backend {backend}" if backend else ""
    choose = f"set quantization.format to one of: {', '.join(usable)}" if usable else "choose another backend"
    row = FORMATS.get(name)
    if row is None:
        raise RecipeError(
            f"quantization.format {name!r} is not known",
            why=f"the formats are {', '.join(FORMATS)}",
            next=choose,
        )
    if backend is not None and backend not in row.backends:
        raise RecipeError(
            f"quantization.format {name} cannot be executed by backend {backend}",
            why=f"backends that execute {name}: {', '.join(row.backends)}",
            next=choose,
        )
    if not row.executable:
        raise RecipeError(
            f"quantization.format {name} cannot be built by this version of lpx",
            why=f"formats it builds{for_backend}: {', '.join(usable) or 'none of them'}",
            next=choose,
        )
    return row


def check_kv_cache(name: str) -> None:
    """Refuse KV-cache formats that this version cannot build.

    Raises:
        RecipeError: INT8 and FP8 KV caches need scales from calibration, which this version does not do.
    """
    if name not in KV_CACHE:
        raise RecipeError(
            f"quantization.kv_cache {name!r} is not known",
            why=f"the KV-cache formats are {', '.join(KV_CACHE)}",
            next="set quantization.kv_cache to none",
        )
    if name != "none":
        raise RecipeError(
            f"quantization.kv_cache {name} cannot be built by this version of lpx",
            why="its scales come from calibration data that is run through the model; "
            "without it they would all be 1.0 and accuracy would be lost",
            next="set quantization.kv_cache to none",
        )


def markdown_table() -> str:
    """The table of formats for the docs."""
    head = "| format | quant_algo | layouts | backends | lowest SM | needs calibration | built by this version |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for row in FORMATS.values():
        sm = str(row.lowest_sm)
        if row.refused_sm is not None:
            sm += f" (not {row.refused_sm[0]}–{row.refused_sm[1]} on tensorrt)"
        cells = (
            f"`{row.name}`",
            f"`{row.quant_algo}`" if row.quant_algo else "–",
            ", ".join(row.layouts),
            ", ".join(row.backends),
            sm,
            "yes" if row.needs_calibration else "no",
            "yes" if row.executable else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
