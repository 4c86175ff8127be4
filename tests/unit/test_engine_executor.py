"""The executor that Triton's engine host runs: what each parameter does to the tokens, and how requests share a batch.

Expected values come from the formulas, applied here to the logits of whole forward passes of the same graph. Every
parameter is also checked to make a difference: without it the expectation would be another one.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
import served_modules  # noqa: F401

from engine_executor import load_description, load_executor  # isort: skip
from engine_request import EngineLimits, EngineRequest, RequestError, parse  # isort: skip
from tiny_engine import reference_logits, write_engine  # isort: skip

PROMPT = list(range(5, 25))
LONG = [5 + position % 90 for position in range(320)]  # 10 blocks of 32 tokens, 5 steps of 64


class Answer:
    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.steps: list[int] = []  # in which steps tokens came
        self.reason: str | None = None
        self.message = ""


class Engine:
    """A tiny engine folder, loaded as the host loads it."""

    def __init__(self, folder: Path, *, end_ids: tuple[int, ...] = (2, 3), **scheduler: Any) -> None:
        write_engine(folder, end_ids=end_ids, max_input_len=512, max_seq_len=640)
        description = load_description(folder)
        description["scheduler"].update(scheduler)
        self.limits = EngineLimits.from_description(description)
        self.executor = load_executor(folder, description)

    def run(self, *requests: dict[str, Any], later: dict[int, dict[str, Any]] | None = None) -> list[Answer]:
        """All requests to their ends; those of `later` are added before the step they are named by."""
        answers: list[Answer] = []

        def add(message: dict[str, Any]) -> None:
            message = {"input_ids": PROMPT, "max_tokens": 12, "end_ids": [], **message}
            self.executor.add(len(answers), parse(message, self.limits))
            answers.append(Answer())

        for message in requests:
            add(message)
        later = dict(later or {})
        step = 0
        while self.executor.busy:
            step += 1
            if step in later:
                add(later.pop(step))
            for event in self.executor.step():
                answer = answers[event.key]  # type: ignore[call-overload]
                if event.sequences:
                    answer.steps.append(step)
                for sequence in event.sequences:
                    answer.ids.setdefault(sequence.index, []).extend(sequence.ids)
                if event.reason is not None:
                    answer.reason, answer.message = event.reason, event.message
        return answers


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(tmp_path_factory.mktemp("engine"))


# --- penalties: greedy, so every token is decided by the formula ------------------------------------------------------


def repetition(logits: Any, prompt: list[int], ids: list[int], value: float) -> Any:
    seen = list({*prompt, *ids})
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / value, logits[seen] * value)
    return logits


def presence(logits: Any, prompt: list[int], ids: list[int], value: float) -> Any:
    logits[list(set(ids))] -= value
    return logits


def frequency(logits: Any, prompt: list[int], ids: list[int], value: float) -> Any:
    for token, count in Counter(ids).items():
        logits[token] -= value * count
    return logits


PENALTIES = {
    "repetition_penalty": (repetition, [0.3, 1.5, 3.0]),
    "presence_penalty": (presence, [-1.0, 2.0]),
    "frequency_penalty": (frequency, [-1.5, 0.4, 2.0]),
}
# Greedy repeats 70 after PROMPT; a prompt of its first tokens shows what encouraging a repetition does.
PROMPTS = (PROMPT, [70, 15, 91, 46], [30, 31, 32, 33, 30, 31])


def greedy(prompt: list[int], count: int, penalty: Any = None, value: float = 0.0) -> list[int]:
    ids: list[int] = []
    for _ in range(count):
        logits = reference_logits(prompt + ids)[-1].astype(np.float64)
        ids.append(int((penalty(logits, prompt, ids, value) if penalty else logits).argmax()))
    return ids


@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_follow_their_formulas(name: str, engine: Engine) -> None:
    """Presence and frequency count generated tokens only, repetition counts the prompt's too."""
    penalty, values = PENALTIES[name]
    plain = [greedy(prompt, 12) for prompt in PROMPTS]
    changed = 0
    for value in values:
        answers = engine.run(*({"input_ids": prompt, name: value} for prompt in PROMPTS))
        found = [answer.ids[0] for answer in answers]
        assert found == [greedy(prompt, 12, penalty, value) for prompt in PROMPTS], value
        changed += found != plain
    assert changed >= len(values) - 1


def test_penalties_work_together(engine: Engine) -> None:
    values = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}

    def together(logits: Any, prompt: list[int], ids: list[int], _: float) -> Any:
        for name, value in values.items():
            logits = PENALTIES[name][0](logits, prompt, ids, value)
        return logits

    (answer,) = engine.run(values)
    assert answer.ids[0] == greedy(PROMPT, 12, together)


# --- sampling: the first token of many seeds against its distribution -------------------------------------------------

DRAWS = 1500


def distribution(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Any:
    """Probabilities [vocabulary] of the first token: temperature, then the k best, then the nucleus of those."""
    logits = reference_logits(PROMPT)[-1].astype(np.float64) / temperature
    chances = np.exp(logits - logits.max())
    order = np.argsort(-chances)
    if top_k:
        chances[order[top_k:]] = 0.0
    chances /= chances.sum()
    before = np.cumsum(chances[order]) - chances[order]
    chances[order[before >= top_p]] = 0.0
    return chances / chances.sum()


def misfit(counts: Any, chances: Any) -> float:
    """Standard deviations that chi² lies beyond its mean; infinite for a token that cannot come."""
    if counts[chances == 0].any():
        return float("inf")
    expected = chances * counts.sum()
    frequent = expected >= 5
    groups = [(counts[frequent], expected[frequent])]
    rest = expected[~frequent].sum()
    if rest >= 5:
        groups.append((np.array([counts[~frequent].sum()]), np.array([rest])))
    chi = sum(float(((seen - wanted) ** 2 / wanted).sum()) for seen, wanted in groups)
    freedom = sum(len(seen) for seen, _ in groups) - 1
    return (chi - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5, "top_p": 1.0},
        {"temperature": 3.0, "top_p": 1.0},
        {"top_k": 5},
        {"top_p": 0.6},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.7},
    ],
    ids=str,
)
def test_samples_follow_their_distribution(settings: dict[str, Any], engine: Engine) -> None:
    answers = engine.run(*({**settings, "seed": seed, "max_tokens": 1} for seed in range(DRAWS)))
    counts = np.bincount([answer.ids[0][0] for answer in answers], minlength=96)
    assert misfit(counts, distribution(**settings)) < 4
    for left_out in settings:
        others = {name: value for name, value in settings.items() if name != left_out}
        if left_out != "top_p" or settings["top_p"] < 1:
            assert misfit(counts, distribution(**others)) > 20, left_out


def test_a_cold_temperature_is_greedy(engine: Engine) -> None:
    answers = engine.run(*({"temperature": 1e-3, "top_p": 1.0, "seed": seed} for seed in range(4)), {})
    assert all(answer.ids == answers[-1].ids for answer in answers)
    warm = engine.run(*({"temperature": 1.0, "top_p": 1.0, "seed": seed} for seed in range(4)))
    assert len({tuple(answer.ids[0]) for answer in warm}) == 4


@pytest.mark.parametrize(
    ("asked", "ids", "reason"),
    [(None, [], "stop"), ([], [70] * 4, "length"), ([15], [70] * 4, "length"), ([15, 70], [], "stop")],
)
@pytest.mark.parametrize("beams", [1, 2])
def test_only_the_end_ids_of_the_request_end_it(
    asked: list[int] | None, ids: list[int], reason: str, beams: int, tmp_path: Path
) -> None:
    """The model's own end id, 70, is what greedy search chooses every time."""
    engine = Engine(tmp_path, end_ids=(70, 2))
    assert greedy(PROMPT, 4) == [70] * 4
    (answer,) = engine.run({"max_tokens": 4, "end_ids": asked, "beam_width": beams})
    assert (answer.ids.get(0, []), answer.reason) == (ids, reason)


# --- one batch --------------------------------------------------------------------------------------------------------


def test_a_request_joins_the_running_batch(engine: Engine) -> None:
    first, second = engine.run({"max_tokens": 60}, later={4: {"input_ids": [7, 8, 9], "max_tokens": 5}})
    assert second.steps[0] <= 5
    assert set(second.steps) <= set(first.steps)
    assert first.steps[-1] >= 60
    # Neither notices the other.
    assert [first.ids, second.ids] == [
        engine.run({"max_tokens": 60})[0].ids,
        engine.run({"input_ids": [7, 8, 9], "max_tokens": 5})[0].ids,
    ]


def test_more_than_max_batch_size_wait_for_a_place(tmp_path: Path) -> None:
    engine = Engine(tmp_path, max_num_seqs=2)
    answers = engine.run({"max_tokens": 10}, {"max_tokens": 20}, {"max_tokens": 4})
    assert answers[0].steps[0] == answers[1].steps[0]
    assert answers[0].steps[-1] < answers[2].steps[0] <= answers[0].steps[-1] + 2
    assert set(answers[2].steps) <= set(answers[1].steps)
    assert [answer.reason for answer in answers] == ["length"] * 3


def test_who_waits_for_a_place_can_be_cancelled(tmp_path: Path) -> None:
    engine = Engine(tmp_path, max_num_seqs=1)
    for key in range(3):
        engine.executor.add(key, parse({"input_ids": PROMPT, "max_tokens": 3, "end_ids": []}, engine.limits))
    engine.executor.cancel(1)
    ends = []
    while engine.executor.busy:
        ends += [(event.key, event.reason) for event in engine.executor.step() if event.reason]
    assert ends == [(1, "cancelled"), (0, "length"), (2, "length")]


@pytest.mark.parametrize("pieces", [True, False])
def test_beams_take_one_place(pieces: bool, tmp_path: Path) -> None:
    engine = Engine(tmp_path, max_num_seqs=1, dynamic_split_fuse=pieces)
    (answer,) = engine.run({"beam_width": 4, "num_return_sequences": 4, "max_tokens": 5})
    assert sorted(answer.ids) == [0, 1, 2, 3]


@pytest.mark.parametrize(("reuse", "steps"), [(True, 1), (False, 5)])
def test_the_beginning_of_a_known_prompt_is_reused_when_asked_for(reuse: bool, steps: int, tmp_path: Path) -> None:
    """320 tokens at 64 a step take five steps; with their blocks in the cache, one."""
    engine = Engine(tmp_path, enable_prefix_caching=reuse)
    first, second = (engine.run({"input_ids": LONG, "max_tokens": 8})[0] for _ in range(2))
    assert (first.steps[0], second.steps[0]) == (5, steps)
    assert first.ids[0] == second.ids[0] == greedy(LONG, 8)


def test_a_long_prompt_in_pieces_leaves_the_others_running(engine: Engine) -> None:
    prompt = LONG[::-1]
    other, long = engine.run({"max_tokens": 20}, later={3: {"input_ids": prompt, "max_tokens": 4}})
    assert long.steps[0] >= 3 + 5 - 1
    assert other.steps == list(range(1, 21))
    assert long.ids[0] == greedy(prompt, 4)


def test_without_pieces_a_prompt_beyond_one_step_is_refused_and_no_more(tmp_path: Path) -> None:
    engine = Engine(tmp_path, dynamic_split_fuse=False)
    with pytest.raises(RequestError, match=r"320 tokens.*64"):
        engine.run({"input_ids": LONG})
    (answer,) = engine.run({"input_ids": LONG[:64], "max_tokens": 4})
    assert answer.ids[0] == greedy(LONG[:64], 4)


@pytest.mark.parametrize("pieces", [True, False])
def test_requests_that_outgrow_the_cache_together_take_turns(pieces: bool, tmp_path: Path) -> None:
    """Seven blocks hold one request of 160 tokens, not two: one is set back and computed again, longer than a step."""
    engine = Engine(tmp_path, num_kv_blocks=7, dynamic_split_fuse=pieces, enable_prefix_caching=False)
    prompts = [LONG[:64], LONG[9:73]]
    answers = engine.run(*({"input_ids": prompt, "max_tokens": 96} for prompt in prompts))
    assert [answer.reason for answer in answers] == ["length", "length"]
    for prompt, answer in zip(prompts, answers):
        assert answer.ids == engine.run({"input_ids": prompt, "max_tokens": 96})[0].ids


# --- nothing that a request may say is without a test of its effect ---------------------------------------------------

BEAMS = "tests/parity/test_engine_paged.py::test_beams_equal_transformers"
HOST = "tests/unit/test_engine_host.py::"
HERE = "tests/unit/test_engine_executor.py::"
# Field of EngineRequest -> the test that fails when the executor drops it.
SHOWN = {
    "input_ids": HERE + "test_penalties_follow_their_formulas",
    "max_tokens": HERE + "test_a_request_joins_the_running_batch",
    "end_ids": HERE + "test_only_the_end_ids_of_the_request_end_it",
    "min_tokens": HOST + "test_min_tokens_bans_every_end_id",
    "sampling": HERE + "test_a_cold_temperature_is_greedy",
    "temperature": HERE + "test_samples_follow_their_distribution",
    "top_k": HERE + "test_samples_follow_their_distribution",
    "top_p": HERE + "test_samples_follow_their_distribution",
    "repetition_penalty": HERE + "test_penalties_follow_their_formulas",
    "presence_penalty": HERE + "test_penalties_follow_their_formulas",
    "frequency_penalty": HERE + "test_penalties_follow_their_formulas",
    "seed": HOST + "test_same_seed_same_output_whatever_else_runs",
    "beam_width": BEAMS,
    "num_return_sequences": BEAMS,
    "length_penalty": BEAMS,
    "early_stopping": BEAMS,
    "log_probs": HOST + "test_log_probabilities_are_the_log_softmax_of_the_graph",
}


def test_every_field_of_a_request_has_a_test_of_its_effect() -> None:
    assert {field.name for field in fields(EngineRequest)} == set(SHOWN)
    for place in set(SHOWN.values()):
        file, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[2] / file).read_text(), place
