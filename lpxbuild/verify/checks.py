"""Whether a comparison can run on this host, asked without loading anything."""

from __future__ import annotations

import json
import shutil
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import HostError
from lpxbuild.memory import available_memory, gigabytes

if TYPE_CHECKING:
    from lpxbuild.source.records import TensorEntry

OVERHEAD = 1_500_000_000
"""torch, transformers and the activations of a text; OpenVINO with its own."""
SHARE = 0.9
"""Of the available memory may be planned with."""
NEEDS = ("torch", "transformers")
JUDGED = ("compressed-tensors",)
"""Methods of quantized sources that transformers dequantizes by itself on any CPU. It warns of a method that it does
not know and takes the stored numbers for weights, so every other one is left alone."""
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def cannot_run(folder: Path, *, python: Path | None, embedded: bool = True) -> str | None:
    """Why the built model cannot be compared with its source here; None = it can.

    Args:
        folder: the Hugging Face folder of the source.
        python: `runtime.reference_python`, None = lpx's own interpreter.
        embedded: the candidate is run by the embedded engine.
    """
    return missing_packages(python) or not_judgeable(folder, python) or too_large(folder, embedded=embedded)


def missing_packages(python: Path | None) -> str | None:
    """What the reference's interpreter lacks."""
    from lpxbuild.quantization.calibration.interpreter import interpreter, versions

    path = interpreter(python)
    if not path.is_file():
        return f"runtime.reference_python {path} does not exist"
    absent = [name for name in NEEDS if versions(python)[name] is None]
    if absent:
        return f"{' and '.join(absent)} (extra `verify`) not installed for {path}"
    return None


def no_engine() -> str | None:
    """Whether the embedded engine can run the candidate."""
    from importlib.util import find_spec

    return None if find_spec("openvino") else "openvino (extra `embedded`) is not installed"


def not_judgeable(folder: Path, python: Path | None) -> str | None:
    """Models for which transformers is no reference."""
    from lpxbuild.quantization.calibration.interpreter import knows_model_type

    config = json.loads((folder / "config.json").read_bytes())
    model_type = config.get("model_type")
    if not knows_model_type(python, str(model_type)):
        return f"transformers has no class of its own for models of the type {model_type!r}"
    quantized = config.get("quantization_config") or config.get("compression_config")
    method = str(quantized.get("quant_method")) if isinstance(quantized, dict) else None
    if method is None and any((folder / name).is_file() for name in ("hf_quant_config.json", "quantize_config.json")):
        method = "of ModelOpt or GPTQ"
    if method is not None and method not in JUDGED:
        return f"the source is quantized ({method}) in a way that transformers cannot compute on a CPU"
    if not (folder / "tokenizer.json").is_file():
        return "the source has no tokenizer.json, so there are no texts"
    return None


def too_large(folder: Path, *, embedded: bool) -> str | None:
    """Whether the candidate, or the reference layer by layer, does not fit into memory."""
    needed = max(candidate_bytes(folder) if embedded else 0, layerwise_bytes(folder))
    available = available_memory()
    if needed > SHARE * available:
        return f"the comparison needs about {gigabytes(needed)} of memory, {gigabytes(available)} are available"
    return None


def check_scratch(folder: Path, needed: int) -> None:
    """Refuse texts whose logits do not fit on the disk.

    Raises:
        HostError: names both numbers.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HostError(
            f"the logits of both sides take about {gigabytes(needed)}, {gigabytes(free)} are free in {folder.parent}",
            why="they lie in files while they are compared",
            next="make room there, or lower verify.tokens",
        )


def whole_bytes(folder: Path) -> int:
    """Memory of the whole reference: float32 weights, and a file of them while it is read."""
    entries = headers(folder).values()
    return 4 * sum(prod(entry.shape) for entry in entries) + _largest(folder) + OVERHEAD


def candidate_bytes(folder: Path) -> int:
    """Memory of the embedded engine: the plugin keeps float32 copies of 16-bit weights."""
    return 4 * sum(prod(entry.shape) for entry in headers(folder).values()) + OVERHEAD


def layerwise_bytes(folder: Path) -> int:
    """Memory of the reference one layer at a time: a layer, or the largest tensor twice, in float32."""
    entries = headers(folder)
    layers: dict[str, int] = {}
    for name, entry in entries.items():
        number = next((part for part in name.split(".") if part.isdigit()), None)
        if number is not None:
            layers[number] = layers.get(number, 0) + 4 * prod(entry.shape)
    return max([2 * _largest(folder), *layers.values()]) + OVERHEAD


def stored_type(folder: Path, dtype: str) -> str | None:
    """`dtype` where it cannot hold the source's values, None where they are kept bit for bit."""
    found = {_TYPES.get(entry.dtype) for entry in headers(folder).values()} - {None}
    return None if dtype == "float32" or found <= {dtype} else dtype


def headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of the folder's safetensors files."""
    from lpxbuild.source.header import read_header

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(read_header(path, download="lpx build RECIPE"))
    return found


def _largest(folder: Path) -> int:
    return 4 * max((prod(entry.shape) for entry in headers(folder).values()), default=0)
