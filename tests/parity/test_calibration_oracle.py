"""lpx's calibrations on the models and token ids of ModelOpt's recorded ones.

On one host they have ModelOpt's bits. The recorded ones come from a processor with other matrix instructions: there
every largest magnitude is the same bit for bit, and factors differ where the mean or the largest magnitude of a feature
lies between two bfloat16 numbers (up to 6 % of a layer's, by three steps of bfloat16 at most).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lpxbuild.output import Output
from lpxbuild.quantization.calibration.run import run_child
from lpxbuild.quantization.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
import calibration_reference as reference

ORACLE = Path(__file__).parent / "oracle"
SCHEMES = {
    "fp8kv": Scheme("fp8", "fp8"),
    "nvfp4": Scheme("nvfp4"),
    "nvfp4kvfp8": Scheme("nvfp4", "fp8"),
    "int8sqkv8": Scheme("int8_sq", "int8"),
    "int4awq": Scheme("int4_awq"),
    "int4awq64": Scheme("int4_awq", group_size=64),
    "w4a8awq": Scheme("w4a8_awq"),
}
RECORDED = sorted(file.stem for file in (ORACLE / "calibration").glob("*.safetensors"))


@pytest.mark.full
def test_recorded_calibrations(tmp_path: Path, reference_python: Path) -> None:
    assert len(RECORDED) == 12
    batches = json.loads((ORACLE / "calibration" / "ids.json").read_text())
    jobs = {}
    for name in RECORDED:
        model, _, key = name.rpartition("-")
        jobs[name] = reference.Job(ORACLE / "in" / model, SCHEMES[key], batches)
    theirs = reference.run(reference_python, tmp_path / "theirs", jobs)
    for name, job in jobs.items():
        assert job.scheme is not None
        run_child(
            job.folder,
            tmp_path / name,
            scheme=job.scheme,
            batches=batches,
            device="cpu",
            seed=0,
            python=reference_python,
            log=tmp_path / f"{name}.log",
            output=Output.quiet(),
        )
        ours = load_file(tmp_path / name / "scales.safetensors")
        reference.assert_same(ours, theirs[name])
        if job.scheme.format not in ("fp8", "nvfp4"):
            reference.assert_smooths(ours, theirs[name], load_file(job.folder / "model.safetensors"))
        recorded = load_file(ORACLE / "calibration" / f"{name}.safetensors")
        assert set(recorded) == set(ours)
        for tensor, wanted in recorded.items():
            found = ours[tensor].astype(wanted.dtype)
            if tensor.endswith("_amax"):
                assert np.array_equal(reference.bits(found), reference.bits(wanted)), tensor
                continue
            apart = np.abs(found.astype(np.float32) / wanted.astype(np.float32) - 1)
            assert apart.max() <= 3 / 128, (name, tensor)
            assert (apart > 0).mean() <= 0.1, (name, tensor)
