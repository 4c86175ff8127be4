"""Models of images and text: refused; their text parts convert once the script in docs/families.md has saved them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from lpxbuild.errors import SourceError
from lpxbuild.families.table import TEXT_PART
from lpxbuild.output import Output
from lpxbuild.source import check

NAMES = {"gemma3": "gemma3_text", "mistral3": "mistral", "llava": "llama"}
TOKENIZER = Path(__file__).parents[1] / "cases" / "data" / "baseline"

# Imports transformers four times: 40 s.
pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    folder = tmp_path_factory.mktemp("text_part")
    (folder / "script.py").write_text(TEXT_PART)
    done = subprocess.run(
        [
            reference_python,
            Path(__file__).with_name("text_part_reference.py"),
            folder,
            folder / "script.py",
            TOKENIZER,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_is_refused(models: Path, name: str) -> None:
    with pytest.raises(SourceError, match="a model of images and text") as caught:
        check(models / name / "whole", origin=name, output=Output.quiet())
    assert NAMES[name] in caught.value.why


@pytest.mark.parametrize("name", NAMES)
def test_the_text_part_gives_the_logits_of_the_whole(models: Path, name: str, compile_folder, stateful_logits) -> None:
    reference = np.load(models / name / "logits.npz")
    engine = compile_folder(models / name / "text", dtype="float32")
    found = stateful_logits(engine, reference["ids"].tolist())
    np.testing.assert_allclose(found, reference["logits"], atol=2e-5)
