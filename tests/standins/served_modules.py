"""Import what runs inside Triton from tests: its folders on sys.path, and a model.py by its model's name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

MODEL_REPO = Path(__file__).resolve().parents[2] / "model_repo"
CASES = Path(__file__).resolve().parents[1] / "cases" / "data"

for _folder in (MODEL_REPO / "text", MODEL_REPO / "tensorrt_llm", Path(__file__).resolve().parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))


def load_model(name: str) -> ModuleType:
    """model_repo/<name>/model.py; `triton_python_backend_utils` is the stand-in beside this file."""
    spec = importlib.util.spec_from_file_location(f"served_{name}", MODEL_REPO / name / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
