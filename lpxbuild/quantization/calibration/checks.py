"""What can be refused before a weight is read, and what a calibration depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.memory import available_memory, gigabytes
from lpxbuild.quantization.calibration.datasets import check_dataset, digest
from lpxbuild.quantization.calibration.interpreter import check_interpreter, knows_model_type, versions

OVERHEAD_BYTES = 1_000_000_000
"""torch, transformers and ModelOpt themselves with the activations of some hundred tokens: 0.9 GB measured beside the
weights of SmolLM2-135M."""


def inputs(settings: Any, *, base: Path, python: Path | None) -> dict[str, str]:
    """What the result depends on beside the recipe's fields and the source: the texts, and who computed.

    Args:
        settings: the recipe's `quantization.calibration`.
        base: folder that relative paths start from.
        python: `runtime.reference_python`, None = lpx's own interpreter.
    """
    found = versions(python)
    return {
        "dataset": digest(settings.dataset, base),
        **{f"reference {name}": found[name] or "absent" for name in ("nvidia-modelopt", "torch", "transformers")},
    }


def memory_needed(folder: Path) -> int:
    """Bytes that the model takes while it is calibrated: ModelOpt holds all of it.

    Args:
        folder: the Hugging Face folder of the model.
    """
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) + OVERHEAD_BYTES


def check_calibration(settings: Any, *, folder: Path, base: Path, python: Path | None) -> None:
    """Every cheap refusal: the interpreter, the model's kind, the texts, the memory.

    Args:
        settings: the recipe's `quantization.calibration`.
        folder: the Hugging Face folder of the model.
        base: folder that relative paths start from.
        python: `runtime.reference_python`, None = lpx's own interpreter.

    Raises:
        HostError: interpreter, package, network or memory missing.
        SourceError: a model that transformers does not know, texts that cannot be read.
    """
    check_interpreter(python)
    _check_model_type(folder, python)
    check_dataset(settings, base=base, python=python)
    if settings.device != "cpu":
        return  # the child asks the GPU itself, before it loads the model
    needed, available = memory_needed(folder), available_memory()
    if needed > available:
        raise HostError(
            f"calibration needs about {gigabytes(needed)} of memory, {gigabytes(available)} are available",
            why=f"ModelOpt holds the whole model ({gigabytes(needed - OVERHEAD_BYTES)}) while the texts run through it",
            next="free memory, calibrate on a larger host and share LPX_CACHE, or set quantization.calibration.device "
            "to cuda",
        )


def _check_model_type(folder: Path, python: Path | None) -> None:
    model_type = json.loads((folder / "config.json").read_bytes()).get("model_type")
    if not knows_model_type(python, str(model_type)):
        raise SourceError(
            f"models of the type {model_type!r} cannot be calibrated",
            why="transformers has no class of its own for them, and lpx runs no code that comes with a model",
            next="choose a format that needs no calibration (docs/formats.md)",
        )
