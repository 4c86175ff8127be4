"""Through Triton, exact precision, float32, format none: the greedy tokens of transformers, 32 of 32.

One server for all: the engine behind it is exchanged, and its host ended, so that the supervisor starts the next one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from exchange import SETTINGS, Served

from lpxbuild.server import start

# mistral has a window of 8 tokens and the prompts have 24: three windows.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2))


@pytest.fixture(scope="module")
def references(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the tiny models with a tokenizer, which a repository needs."""
    place = tmp_path_factory.mktemp("references")
    for family in FAMILIES:
        shutil.copytree(tiny_models / family, place / family)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model.CASES / "baseline" / name, place / family / name)
    return place


@pytest.fixture(scope="module")
def served(references: Path, tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("parity")
    engine = tiny_model.build_engine(references / "llama", place / "first")
    repository = tiny_model.build_repository(engine, place / "repository")
    with start(repository, log_path=place / "triton.log", settings=SETTINGS) as server:
        yield Served(server, repository)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(served, references, tmp_path, family, tensor, pipeline):
    served.exchange(tiny_model.build_engine(references / family, tmp_path, tensor=tensor, pipeline=pipeline))
    reference = np.load(references / family / "reference.npz")
    tokens, log_probs = served.greedy(reference["prompt"].tolist())
    assert tokens == reference["greedy"].tolist()
    assert np.abs(np.array(log_probs) - reference["log_probs"]).max() <= 1e-3


# (3, 2) also in make test: a real model at the widest split. The others only in make test-all: 540 MB each.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [*(pytest.param(*split, marks=pytest.mark.full) for split in ((1, 1), (3, 1), (1, 2))), (3, 2)],
)
def test_smollm2_equals_transformers(smollm2, tmp_path, tensor, pipeline):
    runtime = tiny_model.Runtime(threads=2, kv_cache_bytes=256 << 20)
    engine = tiny_model.build_engine(smollm2, tmp_path / "built", tensor=tensor, pipeline=pipeline, runtime=runtime)
    repository = tiny_model.build_repository(engine, tmp_path / "repository")
    reference = np.load(smollm2.parent / "reference.npz")
    prompt = json.loads((smollm2.parent / "prompt.json").read_text())
    with start(repository, log_path=tmp_path / "triton.log") as server:
        tokens, log_probs = Served(server, repository).greedy(prompt)
    assert tokens == reference["greedy"].tolist()
    assert np.abs(np.array(log_probs) - reference["log_probs"]).max() <= 1e-3
    # Half a gigabyte each: do not leave them to the end of the session.
    shutil.rmtree(tmp_path)
