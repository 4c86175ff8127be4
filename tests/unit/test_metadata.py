"""What can be installed: the base and the extras, against a list written out here."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BASE = {
    "typer", "rich", "pyyaml", "pydantic", "numpy", "ml_dtypes", "safetensors", "tokenizers", "jinja2",
    "huggingface-hub", "tritonclient[grpc,http]",
}  # fmt: skip
EXTRAS = {
    "embedded": {"numpy", "nvidia-pytriton", "openvino", "openvino-genai"},
    "gguf": {"gguf"},
    "calibrate": {"nvidia-modelopt", "torch", "transformers", "accelerate", "requests", "pyarrow"},
    "verify": {"torch", "transformers"},
    "gateway": set(),
    "bench": set(),
    "ray": {"ray[serve]"},
    "tensorrt": {"tensorrt-llm", "tensorrt", "torch"},
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_.-]+(\[[a-z,]+\])?", line)[0] for line in requirements}


def test_the_base_install_is_these_and_nothing_else(project):
    assert names(project["dependencies"]) == BASE
    (numpy,) = [line for line in project["dependencies"] if line.startswith("numpy")]
    assert numpy == "numpy>=1.26"  # no upper bound: beside numpy 2 nothing that is installed changes


def test_the_extras_are_these(project):
    extras = {name: names(lines) for name, lines in project["optional-dependencies"].items() if name != "dev"}
    assert extras == EXTRAS


def test_dev_needs_no_gpu_package_and_no_torch(project):
    dev = names(project["optional-dependencies"]["dev"])
    assert "lpxbuild[embedded,gguf]" in dev
    assert not dev & (EXTRAS["calibrate"] | EXTRAS["tensorrt"])


def test_transformers_5_is_kept_out(project):
    for extra in ("calibrate", "verify"):
        (line,) = [line for line in project["optional-dependencies"][extra] if line.startswith("transformers")]
        assert line.endswith(",<5")


def test_the_extra_installs_what_a_calibration_demands(project: dict[str, Any]) -> None:
    """pyarrow is for Parquet files alone, so an interpreter without it may calibrate as well."""
    from lpxbuild.quantization.calibration.interpreter import REQUIREMENTS

    assert {*REQUIREMENTS.values(), "pyarrow>=17"} == set(project["optional-dependencies"]["calibrate"])
    assert set(project["optional-dependencies"]["verify"]) <= set(REQUIREMENTS.values())
