"""Cancellation, measured where it counts: at the engine, through the statistics of its host."""

from __future__ import annotations

import secrets
import time
from typing import Any

from lpxbuild.server.engine_host import EngineLink
from lpxbuild.smoke.client import ENSEMBLE, RequestFailed
from lpxbuild.smoke.registry import PROMPT, CheckFailed, Noted, Skipped, Subject, check, require

WANTED_TOKENS = 200
TOKENS_BEFORE_CANCEL = 3
# Within this time the engine must be free again.
LIMIT_SECONDS = 2.0
ENGINE_MODEL = "tensorrt_llm"


def _engine(subject: Subject) -> EngineLink:
    if not subject.streaming:
        raise Skipped("the repository is not decoupled: there is no stream to cancel")
    if subject.engine_directory is None:
        raise Skipped("not measurable: the engine's statistics cannot be reached from here")
    try:
        return EngineLink(subject.engine_directory, timeout=subject.client.idle)
    except OSError as error:
        raise Skipped(f"not measurable: no engine host in {subject.engine_directory} ({error})") from error


def _length(subject: Subject, prompt_tokens: int) -> int:
    """Tokens to ask for: 200, or what the engine's limit leaves."""
    room = WANTED_TOKENS if subject.max_seq_len is None else subject.max_seq_len - prompt_tokens
    if room < 4 * TOKENS_BEFORE_CANCEL:
        raise Skipped(f"max_seq_len {subject.max_seq_len} leaves no room for a long answer")
    return min(WANTED_TOKENS, room)


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


def _verdict(what: str, length: int, seconds: float | None, made: int) -> str:
    if seconds is None:
        raise CheckFailed(f"{what}: the request still runs in the engine after {LIMIT_SECONDS:.0f} s ({made} tokens)")
    require(made < length, f"{what}: all {length} tokens were made")
    return f"engine free after {seconds:.2f} s, {made} of {length} tokens made"


@check("cancel a direct stream")
def cancel_direct(subject: Subject) -> str:
    """A stream to tensorrt_llm that the client cancels ends in the engine."""
    with _engine(subject) as link:
        ids = _prompt_ids(subject)
        length = _length(subject, len(ids))
        before = link.stats()
        fields = {
            "input_ids": ids,
            "input_lengths": len(ids),
            "request_output_len": length,
            **subject.client.declared(ENGINE_MODEL, {"streaming": True, "min_tokens": length, "runtime_top_k": 1}),
        }
        with subject.client.stream(ENGINE_MODEL, [fields]) as stream:
            for _ in range(TOKENS_BEFORE_CANCEL):
                next(stream)
        seconds = _settle(link, int(before["active"]))
        made = int(link.stats()["tokens_total"]) - int(before["tokens_total"])
        return _verdict("cancelled after 3 tokens", length, seconds, made)


def _ensemble_fields(subject: Subject, length: int) -> Any:
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
        length = _length(subject, len(_prompt_ids(subject)))
        before = link.stats()
        request_id = f"lpx-smoke-{secrets.token_hex(4)}"
        with subject.client.stream(ENSEMBLE, [_ensemble_fields(subject, length)], request_id=request_id) as stream:
            for _ in range(TOKENS_BEFORE_CANCEL):
                next(stream)
            _stop(subject, request_id)
            seconds = _settle(link, int(before["active"]))
            for _ in stream:
                pass  # what was on its way; the stream must end for its client too
        made = int(link.stats()["tokens_total"]) - int(before["tokens_total"])
        return _verdict("stopped after 3 tokens", length, seconds, made)


@check("cancel an ensemble stream")
def cancel_ensemble(subject: Subject) -> str:
    """Triton does not pass a bare cancellation on to the steps of an ensemble; said, not hidden."""
    with _engine(subject) as link:
        length = _length(subject, len(_prompt_ids(subject)))
        before = link.stats()
        request_id = f"lpx-smoke-{secrets.token_hex(4)}"
        with subject.client.stream(ENSEMBLE, [_ensemble_fields(subject, length)], request_id=request_id) as stream:
            for _ in range(TOKENS_BEFORE_CANCEL):
                next(stream)
        seconds = _settle(link, int(before["active"]))
        made = int(link.stats()["tokens_total"]) - int(before["tokens_total"])
        if seconds is not None and made < length:
            return _verdict("cancelled after 3 tokens", length, seconds, made)
        _stop(subject, request_id)
        raise Noted(
            f"not passed on by Triton: {made} of {length} tokens were made after the client had gone; "
            "to end a generation send a second request with the same id and stop=true to tensorrt_llm"
        )
