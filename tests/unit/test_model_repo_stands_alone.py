"""What runs inside Triton needs no lpx: a repository that was copied elsewhere serves without it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

MODEL_REPO = Path(__file__).parents[2] / "model_repo"
FILES = sorted(MODEL_REPO.rglob("*.py"))
# What a stub may use, and openvino, which only the engine host imports.
LIBRARIES = {"numpy", "tokenizers", "jinja2", "triton_python_backend_utils"}
ENGINE = {"openvino", "openvino_genai", "numpy"}


def imported(tree: ast.AST) -> set[str]:
    """First parts of all absolute imports, wherever they stand."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the files of a model lie side by side: no packages, no relative imports"
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(MODEL_REPO)))
def test_only_these_libraries_are_imported(file: Path) -> None:
    ours = {path.stem for path in FILES}
    allowed = ENGINE if file.name.startswith("engine_executor") else LIBRARIES
    assert imported(ast.parse(file.read_text())) - set(sys.stdlib_module_names) - ours <= allowed
    assert "lpxbuild" not in imported(ast.parse(file.read_text()))
