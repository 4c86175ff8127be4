"""What every executor of the engine host is: requests in, events out, one thread."""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine_request import EngineRequest, RequestError

_NO_TOKEN = 2**31 - 1  # beyond every vocabulary


@dataclass
class SequenceTokens:
    """New tokens of one sequence; `log_probs` has one value per id, or none when not asked for."""

    index: int
    ids: list[int]
    log_probs: list[float]


@dataclass
class Event:
    """What happened to the request `key` in one step; `reason` set = it is over and owns nothing any more."""

    key: Hashable
    sequences: list[SequenceTokens] = field(default_factory=list)
    reason: str | None = None
    message: str = ""


class Executor(Protocol):
    """Not thread-safe: add, cancel and step are called from the host's one loop."""

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do."""

    def add(self, key: Hashable, request: EngineRequest) -> None:
        """Raises RequestError when the library refuses the request."""

    def cancel(self, key: Hashable) -> None:
        """Ask for the end; the Event with reason "cancelled" comes when its memory is free."""

    def step(self) -> list[Event]:
        """One forward pass of everything that runs; blocks meanwhile."""

    def close(self) -> None:
        """End what runs and give the memory back."""


def load_description(engine: Path) -> dict[str, Any]:
    """engine.json of an engine folder, checked for the backend and format this host knows."""
    path = engine / "engine.json"
    description: dict[str, Any] = json.loads(path.read_text())
    if description.get("format_version") != 1 or description.get("backend") != "openvino":
        raise ValueError(
            f"{path}: format_version {description.get('format_version')!r} of backend {description.get('backend')!r}; "
            "this host runs format_version 1 of openvino"
        )
    return description


def load_executor(engine: Path, description: dict[str, Any]) -> Executor:
    """The executor that engine.json names."""
    name = description.get("executor", "paged")
    if name == "paged":
        from engine_executor_paged import PagedExecutor

        return PagedExecutor(engine, description)
    if name == "stateful":
        from engine_executor_stateful import StatefulExecutor

        return StatefulExecutor(engine, description)
    raise ValueError(f"engine.json names executor {name!r}; this host has 'paged' and 'stateful'")


def generation_config(request: EngineRequest) -> Any:
    """OpenVINO GenAI's GenerationConfig of a request; RequestError when the library refuses a value."""
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.apply_chat_template = False
    config.max_new_tokens = request.max_tokens
    # Where either is left empty, the library puts in the ids of the engine's generation_config.json, for beams also
    # with ignore_eos.
    ends = request.end_ids or {_NO_TOKEN}
    config.eos_token_id = min(ends)
    config.stop_token_ids = set(ends)
    if request.end_ids:
        config.min_new_tokens = request.min_tokens  # bans the end ids, by writing to their logits
    config.repetition_penalty = request.repetition_penalty
    config.presence_penalty = request.presence_penalty
    config.frequency_penalty = request.frequency_penalty
    config.logprobs = int(request.log_probs)
    config.do_sample = request.sampling
    if request.sampling:
        config.temperature = request.temperature
        config.top_p = request.top_p
        if request.top_k:
            config.top_k = request.top_k
        config.rng_seed = request.seed
    if request.beam_width > 1:
        config.num_beams = request.beam_width
        config.num_return_sequences = request.num_return_sequences
        config.length_penalty = request.length_penalty
        # False is Hugging Face's heuristic; TensorRT-LLM's default is to stop at the first full set of beams.
        criteria = openvino_genai.StopCriteria
        config.stop_criteria = criteria.HEURISTIC if request.early_stopping is False else criteria.EARLY
    try:
        config.validate()
    except RuntimeError as error:
        raise RequestError(library_words(error)) from error
    return config


def library_words(error: BaseException) -> str:
    """OpenVINO's exception text without its source path: "Check '…' failed: reason"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [line.split(" failed at ")[0] + " failed" if " failed at " in line else line for line in lines]
    kept = [line for line in kept if not line.startswith("Exception from")]
    return ": ".join(kept) or type(error).__name__


def split_end(ids: list[int], end_ids: frozenset[int]) -> tuple[list[int], bool]:
    """Ids before the first end id, and whether there was one."""
    for position, token in enumerate(ids):
        if token in end_ids:
            return ids[:position], True
    return ids, False
