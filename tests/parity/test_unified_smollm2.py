"""A real model, SmolLM2-135M: the bits of ModelOpt's export from the same calibration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from lpxbuild import source
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import Calibration

sys.path.insert(0, str(Path(__file__).parent))
import unified_reference as reference

ROOT = Path(__file__).resolve().parents[2]
EXPORTS = ("none", "fp8-kv", "int4_awq-g64", "nvfp4")


@pytest.mark.full
def test_every_tensor_has_the_bits_of_modelopt(tmp_path: Path, reference_python: Path, smollm2: Path) -> None:
    """Weights that were trained, calibrated on a few tokens (three minutes): 576 features, 3 KV heads, a tied head."""
    bf16 = tmp_path / "bf16"
    convert_unified(
        source.check(smollm2, origin="smollm2", need_tokenizer=False, output=Output.quiet()),
        bf16,
        dtype="bfloat16",
        output=Output.quiet(),
    )
    checked = reference.checked(bf16)
    script = ROOT / "tests" / "reference" / "unified_exports.py"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # ModelOpt leaves generated code there
    done = subprocess.run(
        [reference_python, script, tmp_path / "theirs", f"{bf16}:{','.join(EXPORTS)}"],
        capture_output=True,
        text=True,
        timeout=1800,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "theirs" / "bf16.json").read_text())["exports"]
    for export in EXPORTS:
        assert "error" not in record[export]
        with safe_open(tmp_path / "theirs" / "bf16.safetensors", "numpy") as file:
            names = [name for name in file.keys() if name.startswith(f"{export}/")]  # noqa: SIM118  not a dict
            found = {name.removeprefix(f"{export}/"): file.get_tensor(name) for name in names}
        out = tmp_path / export
        convert_unified(
            checked,
            out,
            dtype="bfloat16",
            scheme=reference.SCHEMES[export],
            calibration=Calibration(found),
            output=Output.quiet(),
        )
        ours = {name: reference.digest(*tensor) for name, tensor in reference.stored(out).items()}
        assert ours == {**record["none"]["tensors"], **record[export]["tensors"]}, export
