"""Calibration: text is run through the model by NVIDIA ModelOpt, and what its quantizers saw is kept.

The result (`scales.safetensors`, `calibration.json`) is an artifact of its own: it holds no weights, so one serves
every number of ranks and every layout. ModelOpt, torch and transformers (extra `calibrate`) run in a child process, in
lpx's own interpreter or in `runtime.reference_python`.
"""

from __future__ import annotations

from lpxbuild.quantization.calibration.checks import check_calibration, inputs
from lpxbuild.quantization.calibration.run import CalibrationReport, calibrate

__all__ = ["CalibrationReport", "calibrate", "check_calibration", "inputs"]
