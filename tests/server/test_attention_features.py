"""Through Triton: each attention feature gives the greedy tokens of transformers, and removing it does not.

The prompts have 24 tokens, three windows of 8. A feature is removed from config.json alone: the weights stay.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_model
from exchange import SETTINGS, Served

from lpxbuild.server import start


@dataclass(frozen=True)
class Feature:
    """A tiny model that has it, the executor that runs it, and the config without it."""

    model: str
    executor: str
    without: dict[str, Any]
    limits: dict[str, int] = field(default_factory=dict)


FEATURES = {
    "sliding_window": Feature("mistral", "paged", {"sliding_window": None}),
    "sliding_window_with_biases": Feature("starcoder2", "paged", {"sliding_window": None}),
    "mixed_layers": Feature("qwen2_mixed_layers", "paged", {"layer_types": ["sliding_attention"] * 4}),
    "two_rope_bases": Feature("gemma3_text", "paged", {"rope_local_base_freq": 1e6}),
    "attention_scale": Feature("granite", "paged", {"attention_multiplier": 0.25}),
    "short_factors": Feature("phi3", "paged", {"rope_scaling": None}, {"max_input_len": 64, "max_seq_len": 128}),
    "soft_cap": Feature("gemma2", "stateful", {"attn_logit_softcapping": None}),
    "soft_cap_with_windows": Feature("gemma2", "stateful", {"layer_types": ["full_attention"] * 4}),
    "alibi": Feature("falcon_rw", "stateful", {"alibi": False}),
}


@pytest.fixture(scope="module")
def served(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("features")
    engine = tiny_model.build_engine(with_tokenizer(tiny_models / "llama", place / "source"), place / "first")
    repository = tiny_model.build_repository(engine, place / "repository")
    with start(repository, log_path=place / "triton.log", settings=SETTINGS) as server:
        yield Served(server, repository)


def with_tokenizer(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy of a tiny model with the tokenizer that a repository needs, and other values in its config.json."""
    shutil.copytree(folder, copy)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model.CASES / "baseline" / name, copy / name)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


def answer(served: Served, folder: Path, place: Path, feature: Feature) -> tuple[list[int], list[float]]:
    """The greedy tokens of a model's 24 tokens, through Triton, on the executor that the feature is run by."""
    engine = tiny_model.build_engine(folder, place, **feature.limits)
    executor = json.loads((engine / "engine.json").read_text())["executor"]
    served.exchange(engine)
    prompt = np.load(folder / "reference.npz")["prompt"]
    assert len(prompt) == 3 * 8
    return served.greedy(prompt.tolist(), log_probs=executor == "paged")


@pytest.mark.parametrize("name", FEATURES)
def test_the_feature_is_executed_exactly(served, tiny_models: Path, tmp_path: Path, name: str) -> None:
    feature = FEATURES[name]
    folder = with_tokenizer(tiny_models / feature.model, tmp_path / "source")
    tokens, log_probs = answer(served, folder, tmp_path / "with", feature)
    assert json.loads((served.engine / "engine.json").read_text())["executor"] == feature.executor
    reference = np.load(folder / "reference.npz")
    assert tokens == reference["greedy"].tolist()
    if feature.executor == "paged":
        assert np.abs(np.array(log_probs) - reference["log_probs"]).max() <= 1e-3


@pytest.mark.parametrize("name", FEATURES)
def test_removing_the_feature_would_be_seen(served, tiny_models: Path, tmp_path: Path, name: str) -> None:
    feature = FEATURES[name]
    changed = with_tokenizer(tiny_models / feature.model, tmp_path / "source", **feature.without)
    tokens, _ = answer(served, changed, tmp_path / "without", feature)
    assert tokens != np.load(changed / "reference.npz")["greedy"].tolist()
