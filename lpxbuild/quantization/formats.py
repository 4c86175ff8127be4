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
        refused_sm: compute capabilities that TensorRT-LLM's engine builder refuses (first, last).
    """

    name: str
    quant_algo: str | None
    bits: int
    layouts: tuple[Layout, ...]
    backends: tuple[str, ...]
    lowest_sm: int
    needs_calibration: bool
    refused_sm: tuple[int, int] | None = None


_TRT: tuple[Layout, ...] = ("tensorrt_llm",)
_BOTH: tuple[Layout, ...] = ("tensorrt_llm", "unified_hf")
_BLACKWELL_DATACENTER = (100, 119)
_EVERY = ("tensorrt", "pytorch", "vllm", "openvino")
_NO_VLLM = ("tensorrt", "pytorch", "openvino")
_TRT_BACKENDS = ("tensorrt", "openvino")

FORMATS = MappingProxyType(
    {
        row.name: row
        for row in (
            Format("none", None, 16, _BOTH, _EVERY, 80, False),
            Format("int8_wo", "W8A16", 8, _TRT, _TRT_BACKENDS, 80, False, _BLACKWELL_DATACENTER),
            Format("int4_wo", "W4A16", 4, _TRT, _TRT_BACKENDS, 80, False, _BLACKWELL_DATACENTER),
            Format("int4_rtn", "W4A16_AWQ", 4, _TRT, _TRT_BACKENDS, 80, False, _BLACKWELL_DATACENTER),
            Format("int4_awq", "W4A16_AWQ", 4, _BOTH, _NO_VLLM, 80, True, _BLACKWELL_DATACENTER),
            Format("w4a8_awq", "W4A8_AWQ", 4, _BOTH, _NO_VLLM, 89, True, _BLACKWELL_DATACENTER),
            Format("int8_sq", "W8A8_SQ_PER_CHANNEL", 8, _TRT, _TRT_BACKENDS, 80, True, _BLACKWELL_DATACENTER),
            Format("fp8", "FP8", 8, _BOTH, _EVERY, 89, True),
            Format("fp8_pc_pt", "FP8_PER_CHANNEL_PER_TOKEN", 8, _BOTH, _EVERY, 89, False, _BLACKWELL_DATACENTER),
            Format("nvfp4", "NVFP4", 4, _BOTH, _EVERY, 100, True),
            Format("w4a16_nvfp4", "W4A16_NVFP4", 4, _BOTH, ("vllm", "openvino"), 80, False),
        )
    }
)
"""All formats by name, in the order of the docs. Facts of NVIDIA's support matrix; backends other than `openvino` are
taken from sources, not from runs: vLLM's ModelOpt loader knows FP8, NVFP4 and their variants but no integers, and no
TensorRT-LLM up to 1.2 knows W4A16_NVFP4 or SmoothQuant in its PyTorch backend."""

KV_CACHE = MappingProxyType({"none": None, "int8": "INT8", "fp8": "FP8"})
"""KV-cache formats → TensorRT-LLM's kv_cache_quant_algo."""

_KV_CACHE_SM = {"int8": (80, _BLACKWELL_DATACENTER), "fp8": (89, None)}
"""KV-cache format → lowest compute capability, and those that TensorRT-LLM's engine builder refuses."""


def format_for(name: str, *, backend: str | None = None) -> Format:
    """The row of a format, which `backend` executes if one is given.

    Raises:
        RecipeError: unknown, or not executed by the backend; names what can be used.
    """
    usable = [row.name for row in FORMATS.values() if backend is None or backend in row.backends]
    choose = f"set quantization.format to one of: {', '.join(usable)}"
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
    return row


def check_kv_cache(name: str, *, backend: str | None = None) -> None:
    """Refuse KV-cache formats that the backend does not read.

    Raises:
        RecipeError: unknown, or INT8 with a backend that loads unified checkpoints.
    """
    if name not in KV_CACHE:
        raise RecipeError(
            f"quantization.kv_cache {name!r} is not known",
            why=f"the KV-cache formats are {', '.join(KV_CACHE)}",
            next="set quantization.kv_cache to none",
        )
    if name == "int8" and backend in ("pytorch", "vllm"):
        raise RecipeError(
            f"quantization.kv_cache int8 cannot be executed by backend {backend}",
            why="a unified Hugging Face checkpoint has scales of FP8 KV caches only",
            next="set quantization.kv_cache to fp8 or none, or backend to tensorrt or openvino",
        )


def markdown_table() -> str:
    """The table of formats for the docs."""
    head = "| format | quant_algo | layouts | backends | lowest SM | needs calibration |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in FORMATS.values():
        cells = (
            f"`{row.name}`",
            f"`{row.quant_algo}`" if row.quant_algo else "–",
            ", ".join(row.layouts),
            ", ".join(row.backends),
            _sm(row.lowest_sm, row.refused_sm),
            "yes" if row.needs_calibration else "no",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def kv_cache_table() -> str:
    """The table of KV-cache formats for the docs."""
    lines = ["| kv_cache | kv_cache_quant_algo | backends | lowest SM | needs calibration |", "|---|---|---|---|---|"]
    for name, algorithm in KV_CACHE.items():
        if algorithm is None:
            continue
        lowest, refused = _KV_CACHE_SM[name]
        needs = "yes" if name == "int8" else "pytorch, vllm: yes; tensorrt, openvino: 1.0 without"
        backends = ", ".join(backend for backend in _EVERY if _reads(name, backend))
        lines.append(f"| `{name}` | `{algorithm}` | {backends} | {_sm(lowest, refused)} | {needs} |")
    return "\n".join(lines) + "\n"


def _reads(name: str, backend: str) -> bool:
    try:
        check_kv_cache(name, backend=backend)
    except RecipeError:
        return False
    return True


def _sm(lowest: int, refused: tuple[int, int] | None) -> str:
    return f"{lowest}" if refused is None else f"{lowest} (not {refused[0]}–{refused[1]} on tensorrt)"
