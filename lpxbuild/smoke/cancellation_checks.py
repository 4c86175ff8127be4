"""Cancellation, measured where it counts: at the engine, through the statistics of its host."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lpxbuild.server.engine_host import EngineLink
from lpxbuild.smoke.client import ENSEMBLE, Fields, RequestFailed, Response
from lpxbuild.smoke.registry import PROMPT, CheckFailed, Noted, Skipped, Subject, check, require

WANTED_TOKENS = 200
# Where the engine had made them all before the cancel arrived, the next tries ask for more.
MOST_TOKENS = 2000
TOKENS_BEFORE_CANCEL = 3
# Within this time the engine must be free again.
LIMIT_SECONDS = 2.0
# A small model is done in less than a cancel needs on its way. Only when the engine went on for longer than this, in
# every try, do all tokens mean that the cancel was ignored.
TRAVEL_SECONDS = 0.5
TRIES = 5
ENGINE_MODEL = "tensorrt_llm"


@dataclass(frozen=True)
class Outcome:
    """What the engine did after a cancel: seconds until it was free (None: longer than the limit), tokens made."""

    seconds: float | None
    made: int
    ended_before: bool = False


def _engine(subject: Subject) -> EngineLink:
    if not subject.streaming:
        raise Skipped("the repository is not decoupled: there is no stream to cancel")
    if subject.engine_directory is None:
        raise Skipped("not measurable: the engine's statistics cannot be reached from here")
    try:
        return EngineLink(subject.engine_directory, timeout=subject.client.idle)
    except OSError as error:
        # The folder is known, so the server is lpx's own: there is an engine host, or something is broken.
        raise CheckFailed(f"not measurable: no engine host answers in {subject.engine_directory} ({error})") from error


def _room(subject: Subject) -> int:
    """The most tokens that may be asked for after the prompt."""
    if subject.max_seq_len is None:
        return WANTED_TOKENS
    room = min(MOST_TOKENS, subject.max_seq_len - len(_prompt_ids(subject)))
    if room < 4 * TOKENS_BEFORE_CANCEL:
        raise Skipped(f"max_seq_len {subject.max_seq_len} leaves no room for a long answer")
    return room


def _prompt_ids(subject: Subject) -> list[int]:
    response = subject.client.infer("preprocessing", [{"QUERY": PROMPT, "REQUEST_OUTPUT_LEN": 1}])
    return [int(token) for token in response.outputs["INPUT_ID"].reshape(-1)]


def _settle(link: EngineLink, active: int) -> float | None:
    """Seconds until no more than `active` requests run; None when that takes longer than the limit."""
    started = time.monotonic()
    while time.monotonic() - started <= LIMIT_SECONDS:
        if int(link.stats()["active"]) <= active:
            return time.monotonic() - started
        time.sleep(0.02)
    return None


def _begun(stream: Iterator[Response], responses: int) -> bool:
    """Wait for so many responses; False where the stream is over before."""
    return all(next(stream, None) is not None for _ in range(responses))


def judge(what: str, room: int, attempt: Callable[[int, int], Outcome]) -> str:
    """Try until the engine was seen to stop early.

    Args:
        what: names the cancel in a failure.
        room: the most tokens that may be asked for.
        attempt: (tokens to ask for, responses to wait for before the cancel) → what came of it.
    """
    length, responses = min(WANTED_TOKENS, room), TOKENS_BEFORE_CANCEL
    waits = []
    for _ in range(TRIES):
        outcome = attempt(length, responses)
        if outcome.seconds is None:
            raise CheckFailed(
                f"{what}: the request still runs in the engine after {LIMIT_SECONDS:.0f} s ({outcome.made} tokens)"
            )
        require(outcome.made > 0, f"{what}: the engine made no token")
        if outcome.made < length:
            require(not outcome.ended_before, f"the stream ended by itself after {outcome.made} of {length} tokens")
            return f"engine free after {outcome.seconds:.2f} s, {outcome.made} of {length} tokens made"
        waits.append(outcome.seconds)
        length, responses = room, 1
    require(
        min(waits) <= TRAVEL_SECONDS,
        f"{what}: all {length} tokens were made, in {TRIES} tries, {min(waits):.2f} s and more after it",
    )
    raise Skipped(
        f"the model is faster than a cancel can be: all {length} tokens were made within {min(waits):.2f} s of it, "
        f"in {TRIES} tries; a larger limits.max_seq_len leaves room for a longer answer"
    )


@check("cancel a direct stream")
def cancel_direct(subject: Subject) -> str:
    """A stream to tensorrt_llm that the client cancels ends in the engine."""
    with _engine(subject) as link:
        ids = _prompt_ids(subject)

        def attempt(length: int, responses: int) -> Outcome:
            before = link.stats()
            fields = {
                "input_ids": ids,
                "input_lengths": len(ids),
                "request_output_len": length,
                **subject.client.declared(ENGINE_MODEL, {"streaming": True, "min_tokens": length, "runtime_top_k": 1}),
            }
            with subject.client.stream(ENGINE_MODEL, [fields]) as stream:
                begun = _begun(stream, responses)
            seconds = _settle(link, int(before["active"]))
            return Outcome(seconds, int(link.stats()["tokens_total"]) - int(before["tokens_total"]), not begun)

        return judge("cancelled in its beginning", _room(subject), attempt)


def _ensemble_fields(subject: Subject, length: int) -> Fields:
    return subject.greedy(PROMPT, length, stream=True, min_tokens=length)


def _stop(subject: Subject, request_id: str) -> None:
    """The second request with the same id and stop=true, as NVIDIA's backend has it."""
    rows = [{"input_ids": [0], "input_lengths": 1, "request_output_len": 1, "stop": True}]
    try:
        subject.client.responses(ENGINE_MODEL, rows, request_id=request_id)
    except RequestFailed as error:
        raise CheckFailed(f"the request with stop=true failed: {error}") from error


@check("stop an ensemble stream by its id")
def stop_by_id(subject: Subject) -> str:
    """A second request with the same id and stop=true ends the first one in the engine."""
    with _engine(subject) as link:

        def attempt(length: int, responses: int) -> Outcome:
            before = link.stats()
            request_id = f"lpx-smoke-{secrets.token_hex(4)}"
            with subject.client.stream(ENSEMBLE, [_ensemble_fields(subject, length)], request_id=request_id) as stream:
                begun = _begun(stream, responses)
                _stop(subject, request_id)
                seconds = _settle(link, int(before["active"]))
                for _ in stream:
                    pass  # what was on its way; the stream must end for its client too
            return Outcome(seconds, int(link.stats()["tokens_total"]) - int(before["tokens_total"]), not begun)

        return judge("stopped in its beginning", _room(subject), attempt)


@check("cancel an ensemble stream")
def cancel_ensemble(subject: Subject) -> str:
    """Triton does not pass a bare cancellation on to the steps of an ensemble; said, not hidden."""
    with _engine(subject) as link:
        length = min(WANTED_TOKENS, _room(subject))
        before = link.stats()
        request_id = f"lpx-smoke-{secrets.token_hex(4)}"
        with subject.client.stream(ENSEMBLE, [_ensemble_fields(subject, length)], request_id=request_id) as stream:
            _begun(stream, TOKENS_BEFORE_CANCEL)
        seconds = _settle(link, int(before["active"]))
        made = int(link.stats()["tokens_total"]) - int(before["tokens_total"])
        if seconds is not None and 0 < made < length:
            return f"engine free after {seconds:.2f} s, {made} of {length} tokens made"
        _stop(subject, request_id)
        raise Noted(
            f"not passed on by Triton: {made} of {length} tokens were made though the client had gone; "
            "to end a generation send a second request with the same id and stop=true to tensorrt_llm"
        )
