"""The result of a calibration: what ModelOpt's quantizers saw, by Hugging Face module.

`scales.safetensors` holds ModelOpt's own buffers under their own names, so that one file serves every layout and every
split, and so that a file made elsewhere can be read as well:

    <module>.input_quantizer._amax             largest magnitude of the input, one number
    <module>.input_quantizer._pre_quant_scale  (in,) factors of the input (AWQ, SmoothQuant)
    <attention>.k_bmm_quantizer._amax          largest magnitude of the keys; v_bmm_quantizer for the values
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError

SCALES = "scales.safetensors"
RECORD = "calibration.json"


class Calibration:
    """Calibrated numbers; arrays keep the type that ModelOpt gave them (bfloat16 as ml_dtypes.bfloat16)."""

    def __init__(self, tensors: Mapping[str, Any], record: Mapping[str, Any] | None = None) -> None:
        self._tensors = tensors
        self.record: Mapping[str, Any] = record or {}

    def input_amax(self, module: str) -> float:
        """Largest magnitude of a linear's input, behind its pre_quant_scale where it has one."""
        return float(self._need(f"{module}.input_quantizer._amax").reshape(-1).max())

    def pre_quant_scale(self, module: str) -> Any:
        """(in,) factors that a linear's input is multiplied with; its weight is divided by them."""
        return self._need(f"{module}.input_quantizer._pre_quant_scale").reshape(-1)

    def key_value_amax(self, attention: str) -> tuple[float, float]:
        """Largest magnitudes of keys and values of an attention module ("model.layers.0.self_attn")."""
        key, value = (self._need(f"{attention}.{kind}_bmm_quantizer._amax") for kind in "kv")
        return float(key.reshape(-1).max()), float(value.reshape(-1).max())

    def has_factors(self, module: str) -> bool:
        """Whether a linear's input has factors; an expert that no text reached has none."""
        return self.has(f"{module}.input_quantizer._pre_quant_scale")

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor of this full name."""
        return name in self._tensors

    def _need(self, name: str) -> Any:
        if name not in self._tensors:
            raise SourceError(
                f"the calibration has no {name}",
                why="it was made for another model or another quantization format",
                next="calibrate again: lpx build RECIPE --force",
            )
        return self._tensors[name]


def read_calibration(folder: Path) -> Calibration:
    """Read the artifact of a calibration.

    Raises:
        SourceError: a file is missing or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        import ml_dtypes  # noqa: F401  makes numpy know bfloat16

        return Calibration(load_file(folder / SCALES), json.loads((folder / RECORD).read_bytes()))
    except (OSError, ValueError, SafetensorError) as error:
        raise SourceError(
            f"the calibration in {folder} cannot be read: {error}",
            next="calibrate again: lpx build RECIPE --force",
        ) from error
