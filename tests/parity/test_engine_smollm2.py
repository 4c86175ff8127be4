"""A real model: SmolLM2-135M from its GGUF, at every split its heads allow, against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

# Only in make test-all: 135 million parameters, dequantized, read by torch, and four engines of 540 MB each.
pytestmark = pytest.mark.full


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_tokens_and_logits_equal_transformers(
    tensor: int, pipeline: int, smollm2: Path, compile_folder, paged, stateful_logits
) -> None:
    reference = np.load(smollm2.parent / "reference.npz")
    prompt = json.loads((smollm2.parent / "prompt.json").read_text())
    engine = compile_folder(smollm2, tensor, pipeline, dtype="float32")
    assert np.abs(stateful_logits(engine, prompt) - reference["logits"]).max() < 1e-3
    assert paged(engine).greedy([prompt], 32)[0].ids == reference["greedy"].tolist()
