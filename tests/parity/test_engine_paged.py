"""Greedy tokens, log-probabilities and beams of the shipped executor against transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

# Over 20 s because the reference environment imports torch once per session; the tests take about a second each.
pytestmark = pytest.mark.slow

RANKS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
VARIANTS = ["llama_biases_rope_llama3", "llama_tied_rope_yarn", "qwen2_mixed_layers"]
CASES = Path(__file__).parents[1] / "cases" / "data"
# Cases with a reference run, but extra_unknown, whose unknown tensor is refused (tests/cases); the others are there to
# be refused.
CONVERTING = sorted(
    path.parent.name
    for path in CASES.glob("*/case.json")
    if '"greedy_ids"' in path.read_text() and path.parent.name != "extra_unknown"
)


@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        # Of each split one family; all of them only in make test-all.
        pytest.param(name, *ranks, marks=() if name == "llama" or ranks == (2, 1) else pytest.mark.full)
        for name in FAMILIES
        for ranks in RANKS
    ]
    + [(name, 1, 1) for name in VARIANTS],
)
def test_greedy_equals_transformers(
    name: str, tensor: int, pipeline: int, tiny_models: Path, compile_folder, paged
) -> None:
    """Two equal prompts in one batch, of three windows where the model has one."""
    reference = np.load(tiny_models / name / "reference.npz")
    engine = paged(compile_folder(tiny_models / name, tensor, pipeline, dtype="float32"))
    for answer in engine.greedy([reference["prompt"].tolist()] * 2, 32):
        assert answer.ids == reference["greedy"].tolist()
        assert np.abs(np.array(answer.log_probs) - reference["log_probs"]).max() < 1e-3


@pytest.mark.parametrize("name", ["mistral", "qwen2_mixed_layers"])
def test_windows_hold_across_chunks_and_cached_beginnings(name: str, tiny_models: Path, compile_folder, paged) -> None:
    """A prompt of ten windows in chunks of 64 tokens, then again with its blocks taken from the prefix cache."""
    reference = np.load(tiny_models / name / "reference.npz")
    last = reference["logits"][-1].astype(np.float64)
    expected = last.max() - last.max() - np.log(np.exp(last - last.max()).sum())
    engine = paged(compile_folder(tiny_models / name, dtype="float32"))
    for _ in range(2):
        (answer,) = engine.greedy([reference["ids"].tolist()], 1)
        assert answer.ids == [int(last.argmax())]
        assert answer.log_probs[0] == pytest.approx(expected, abs=1e-3)


def test_requests_of_a_batch_do_not_touch_each_other(tiny_models: Path, compile_folder, paged) -> None:
    engine = paged(compile_folder(tiny_models / "llama", dtype="float32"))
    ids = np.load(tiny_models / "llama" / "reference.npz")["ids"].tolist()
    prompts = [ids[start : start + length] for start, length in ((0, 24), (5, 3), (10, 60), (40, 1), (2, 33))]
    alone = [engine.greedy([prompt], 16)[0].ids for prompt in prompts]
    assert [answer.ids for answer in engine.greedy(prompts, 16)] == alone


def test_beams_equal_transformers(tiny_models: Path, compile_folder, paged) -> None:
    """Order and tokens of four beams; lengths differ, so length_penalty and early_stopping decide."""
    reference = json.loads((tiny_models / "llama" / "beams.json").read_text())
    prompt = np.load(tiny_models / "llama" / "reference.npz")["prompt"].tolist()
    fields = {"input_ids": prompt, "max_tokens": 12, "end_ids": reference["ends"], "beam_width": 4}
    settings = [
        {name: search[name] for name in ("length_penalty", "early_stopping")} for search in reference["searches"]
    ]
    answers = paged(compile_folder(tiny_models / "llama", dtype="float32")).run(
        [{**fields, "num_return_sequences": 4, **setting} for setting in settings]
    )
    found = [[answer[index].ids if index in answer else [] for index in range(4)] for answer in answers]
    expected = [search["sequences"] for search in reference["searches"]]
    for setting, ours, theirs in zip(settings, found, expected):
        assert ours == theirs, setting
    # Each setting makes a difference of its own.
    early, late = expected[:4], expected[4:]
    assert early[1] != early[2] != early[3]
    assert early[3] != late[3]


@pytest.mark.parametrize("case", CONVERTING)
def test_cases_generate_their_reference(case: str, compile_folder, paged, stateful_logits) -> None:
    """Tokens and last logits of the case, at its own number of ranks; never those of a known wrong conversion."""
    expected = json.loads((CASES / case / "case.json").read_text())
    reference = expected["reference"]
    folder = compile_folder(CASES / case, expected["recipe"]["tp_size"])
    (answer,) = paged(folder).greedy([reference["prompt_ids"]], len(reference["greedy_ids"]))
    assert answer.ids == reference["greedy_ids"]
    logits = stateful_logits(folder, reference["prompt_ids"])
    # The reference is rounded to four places.
    assert np.abs(logits[-1] - np.array(reference["last_logits"])).max() < 1e-3
