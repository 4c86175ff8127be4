"""ModelOpt's own calibrations, made by the reference interpreter, and how lpx's are compared with them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
from safetensors.numpy import load_file

from lpxbuild.quantization import awq
from lpxbuild.quantization.scheme import Scheme

SCRIPT = Path(__file__).parents[1] / "reference" / "calibrations.py"
PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "w4a8_awq": "W4A8_AWQ_BETA_CFG",
}
KV_BITS = {"none": None, "int8": 8, "fp8": [4, 3]}
Batches = Sequence[Sequence[Sequence[int]]]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One calibration by ModelOpt; without scheme, keys and values as transformers caches them."""

    folder: Path
    scheme: Scheme | None
    batches: Batches


def run(python: Path, place: Path, jobs: Mapping[str, Job]) -> dict[str, Arrays]:
    """Name → the buffers of ModelOpt's quantizers."""
    place.mkdir(exist_ok=True)
    document = [
        {
            "folder": str(job.folder),
            "batches": job.batches,
            "preset": job.scheme and PRESETS[job.scheme.format],
            "group_size": job.scheme and job.scheme.group_size,
            "kv_bits": job.scheme and KV_BITS[job.scheme.kv_cache],
            "out": str(place / f"{name}.safetensors"),
        }
        for name, job in jobs.items()
    ]
    (place / "jobs.json").write_text(json.dumps(document))
    done = subprocess.run(
        [python, SCRIPT, place / "jobs.json"],
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "TMPDIR": str(place)},
    )
    assert done.returncode == 0, done.stderr
    return {name: load_file(place / f"{name}.safetensors") for name in jobs}


def of_interest(name: str) -> bool:
    """What a checkpoint needs; weights are lpx's own matter, and no format quantizes the input of a norm."""
    return not any(part in name for part in ("weight_quantizer", "smoothed_weight", "act_amax", ".ln_", "norm."))


def assert_same(ours: Arrays, theirs: Arrays) -> None:
    """Every number has the bits of ModelOpt's, in the type that it keeps it in."""
    wanted = {name: array for name, array in theirs.items() if of_interest(name)}
    assert set(ours) == set(wanted)
    for name, array in wanted.items():
        assert np.array_equal(bits(ours[name].astype(array.dtype)), bits(array)), name


def assert_smooths(ours: Arrays, theirs: Arrays, weights: Arrays) -> None:
    """The weight follows from the source's and the factors, bit for bit."""
    smoothed = {name.removesuffix(".smoothed_weight") for name in theirs if name.endswith(".smoothed_weight")}
    assert smoothed
    for module in smoothed:
        weight = weights[f"{module}.weight"]
        wanted = theirs[f"{module}.smoothed_weight"]
        if weight.shape != wanted.shape:
            weight = weight.T
        found = awq.smooth(weight, ours[f"{module}.input_quantizer._pre_quant_scale"])
        assert np.array_equal(bits(found), bits(wanted)), module


def bits(array: Any) -> Any:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(f"u{flat.dtype.itemsize}")
