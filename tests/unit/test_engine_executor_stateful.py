"""The stateful executor: on a plain graph it gives the very tokens of the paged one, one request after the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
import served_modules  # noqa: F401

from engine_executor import load_description, load_executor  # isort: skip
from engine_request import EngineLimits, RequestError, parse  # isort: skip
from tiny_engine import write_engine  # isort: skip

PROMPT = list(range(5, 25))
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"top_k": 20, "temperature": 1.3, "seed": 7, "sampling": True},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "beams": {"beam_width": 3, "num_return_sequences": 3},
    "end_id": {"end_ids": [46], "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "min_tokens": {"end_ids": [70], "min_tokens": 3},
}


class Run:
    """One executor over the tiny engine."""

    def __init__(self, folder: Path, name: str) -> None:
        description = load_description(folder) | {"executor": name}
        self.limits = EngineLimits.from_description(description)
        self.executor = load_executor(folder, description)

    def add(self, key: Any, **fields: Any) -> None:
        message = {"input_ids": PROMPT, "max_tokens": 12, "end_ids": [], **fields}
        self.executor.add(key, parse(message, self.limits))

    def drain(self) -> dict[Any, tuple[dict[int, list[int]], str]]:
        """key → (tokens by sequence, reason)."""
        found: dict[Any, tuple[dict[int, list[int]], str]] = {}
        while self.executor.busy:
            for event in self.executor.step():
                ids, reason = found.get(event.key, ({}, ""))
                for sequence in event.sequences:
                    ids.setdefault(sequence.index, []).extend(sequence.ids)
                found[event.key] = (ids, event.reason or reason)
                assert event.reason != "error", event.message
        return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("engine")
    write_engine(place, end_ids=(2, 3), max_input_len=512, max_seq_len=640)
    return place


@pytest.fixture(scope="module")
def paged(folder: Path) -> Iterator[Run]:
    run = Run(folder, "paged")
    yield run
    run.executor.close()


@pytest.fixture(scope="module")
def stateful(folder: Path) -> Iterator[Run]:
    run = Run(folder, "stateful")
    yield run
    run.executor.close()


@pytest.mark.parametrize("name", REQUESTS)
def test_tokens_and_reason_are_those_of_the_paged_executor(name: str, paged: Run, stateful: Run) -> None:
    for run in (paged, stateful):
        run.add(name, **REQUESTS[name])
    expected = paged.drain()
    assert stateful.drain() == expected
    assert expected[name][0], "a request that says nothing shows nothing"
    assert expected[name][1] == ("stop" if name == "end_id" else "length")
    if name == "min_tokens":
        assert 70 not in expected[name][0][0][:3]


def test_requests_queue_up_and_do_not_touch_each_other(stateful: Run) -> None:
    stateful.add("alone", input_ids=[9, 8, 7])
    alone = stateful.drain()["alone"]
    for key in ("first", "second", "third"):
        stateful.add(key, input_ids=PROMPT if key == "first" else [9, 8, 7])
    together = stateful.drain()
    assert together["second"] == together["third"] == alone
    assert together["first"] != alone


def test_tokens_come_one_after_the_other(stateful: Run) -> None:
    stateful.add("stream", max_tokens=30)
    steps = []
    while stateful.executor.busy:
        steps += [len(s.ids) for event in stateful.executor.step() for s in event.sequences]
    assert sum(steps) == 30
    assert max(steps) <= 2


def test_a_running_request_is_cancelled_before_its_next_token(stateful: Run) -> None:
    stateful.add("long", max_tokens=600)
    heard, reason = 0, None
    while stateful.executor.busy:
        for event in stateful.executor.step():
            heard += sum(len(sequence.ids) for sequence in event.sequences)
            if heard >= 5 and reason is None:
                stateful.executor.cancel("long")
            reason = event.reason or reason
    assert reason == "cancelled"
    assert heard < 100


def test_a_waiting_request_is_cancelled_and_the_next_one_runs(stateful: Run) -> None:
    stateful.add("running", max_tokens=20)
    stateful.add("waiting")
    stateful.add("next", max_tokens=4)
    stateful.executor.cancel("waiting")
    found = stateful.drain()
    assert {key: reason for key, (_, reason) in found.items()} == {
        "running": "length",
        "waiting": "cancelled",
        "next": "length",
    }
    assert found["waiting"][0] == {}


def test_log_probabilities_are_refused_by_name(stateful: Run) -> None:
    with pytest.raises(RequestError, match=r"return_log_probs: .*stateful executor"):
        stateful.add("log_probs", log_probs=True)
    assert not stateful.executor.busy


def test_closing_ends_what_runs(folder: Path) -> None:
    run = Run(folder, "stateful")
    run.add("long", max_tokens=600)
    while not run.executor.step():
        pass
    run.executor.close()  # returns, although hundreds of tokens are left
