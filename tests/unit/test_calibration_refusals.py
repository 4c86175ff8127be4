"""What a calibration refuses before it reads a weight, and how the command says it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lpxbuild.errors import HostError, SourceError
from lpxbuild.quantization.calibration import check_calibration, inputs
from lpxbuild.quantization.calibration.interpreter import _fits
from lpxbuild.recipe.schema import Calibration

BASELINE = Path(__file__).parents[1] / "cases" / "data" / "baseline"


def refused(kind, folder: Path, python: Path | None, **settings: object) -> str:  # type: ignore[no-untyped-def]
    started = time.monotonic()
    with pytest.raises(kind) as error:
        check_calibration(Calibration(**settings), folder=folder, base=folder, python=python)
    assert time.monotonic() - started < 5  # 2 s on a host that does nothing else
    return str(error.value)


def test_an_interpreter_without_the_packages(tmp_path):
    """lpx's own has none of them in the tests."""
    message = refused(HostError, BASELINE, None)
    assert f"{sys.executable} cannot calibrate: nvidia-modelopt is not installed" in message
    assert f"{sys.executable} -m pip install 'nvidia-modelopt==0.47.*' 'torch>=2.8' 'transformers>=4.57,<5'" in message
    assert "runtime.reference_python" in message


def test_an_interpreter_that_is_not_there(tmp_path):
    message = refused(HostError, BASELINE, tmp_path / "venv" / "bin" / "python")
    assert f"runtime.reference_python {tmp_path}/venv/bin/python does not exist" in message
    assert f"python3 -m venv {tmp_path}/venv" in message


def test_an_interpreter_that_is_none(tmp_path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    assert "nvidia-modelopt is not installed" in refused(HostError, BASELINE, program)
    assert set(inputs(Calibration(), base=tmp_path, python=program).values()) > {"absent"}


@pytest.mark.parametrize(
    ("version", "requirement", "fits"),
    [
        ("0.47.0", "nvidia-modelopt==0.47.*", True),
        ("0.47.3+local", "nvidia-modelopt==0.47.*", True),
        ("0.4.7", "nvidia-modelopt==0.47.*", False),
        ("0.48.0", "nvidia-modelopt==0.47.*", False),
        ("2.13.0+cpu", "torch>=2.8", True),
        ("2.8.0", "torch>=2.8", True),
        ("2.7.1", "torch>=2.8", False),
        ("4.57.6", "transformers>=4.57,<5", True),
        ("4.56.2", "transformers>=4.57,<5", False),
        ("5.0.0rc1", "transformers>=4.57,<5", False),
        (None, "torch>=2.8", False),
    ],
)
def test_versions(version, requirement, fits):
    assert _fits(version, requirement) is fits


def test_versions_are_part_of_what_it_depends_on(reference_python, tmp_path):
    found = inputs(Calibration(), base=tmp_path, python=reference_python)
    assert found["reference nvidia-modelopt"].startswith("0.47.")
    assert found["reference transformers"].startswith("4.")
    assert set(found) == {"dataset", *(f"reference {name}" for name in ("nvidia-modelopt", "torch", "transformers"))}


def test_a_model_that_no_host_of_today_holds(reference_python, tmp_path):
    shutil.copy(BASELINE / "config.json", tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 << 40)  # sparse: takes no room, and is not read
    message = refused(HostError, tmp_path, reference_python)
    assert "calibration needs about 4399.05 GB of memory" in message
    assert "ModelOpt holds the whole model (4398.05 GB)" in message


def test_a_model_that_transformers_does_not_know(reference_python, tmp_path):
    config = json.loads((BASELINE / "config.json").read_text()) | {"model_type": "internlm2"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refused(SourceError, tmp_path, reference_python)
    assert "models of the type 'internlm2' cannot be calibrated" in message
    assert "runs no code that comes with a model" in message


def test_an_empty_file_before_anything_else_is_done(reference_python, tmp_path):
    shutil.copy(BASELINE / "config.json", tmp_path)
    (tmp_path / "mine.txt").touch()
    assert "mine.txt has no text" in refused(SourceError, tmp_path, reference_python, dataset="mine.txt")


def test_the_command_neither_asks_nor_waits(reference_python, tmp_path):
    """A data set that only the network has, no network, stdin closed."""
    (tmp_path / "recipe.yaml").write_text(
        f"name: calibrated\nmodel: {{source: {BASELINE}}}\n"
        "quantization: {format: fp8, calibration: {dataset: cnn_dailymail}}\n"
        f"runtime: {{reference_python: {reference_python}}}\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lpxbuild", "build", "recipe.yaml", "--to", "checkpoint"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "LPX_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    assert time.monotonic() - started < 10
    assert done.returncode == 3, done.stderr
    assert "calibration dataset cnn_dailymail cannot be fetched" in done.stderr
    assert "local .txt, .jsonl or .parquet file" in done.stderr
    assert not list(tmp_path.glob("build/*/checkpoint"))
