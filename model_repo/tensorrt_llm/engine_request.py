"""What a client may ask of the engine host, checked against the engine's limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

REASON_STOP, REASON_LENGTH, REASON_CANCELLED, REASON_ERROR = "stop", "length", "cancelled", "error"


class RequestError(Exception):
    """The request cannot be run; the text goes to the client as it is."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits and ids of a compiled engine (engine.json)."""

    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_beam_width: int
    vocab_size: int
    end_ids: tuple[int, ...]
    pad_id: int

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> EngineLimits:
        limits = description["limits"]
        return cls(
            max_batch_size=int(limits["max_batch_size"]),
            max_input_len=int(limits["max_input_len"]),
            max_seq_len=int(limits["max_seq_len"]),
            max_beam_width=int(limits.get("max_beam_width", 1)),
            vocab_size=int(description["vocab_size"]),
            end_ids=tuple(int(i) for i in description["end_ids"]),
            pad_id=int(description["pad_id"]),
        )


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and how to continue it. Sampling is greedy unless `sampling` is set."""

    input_ids: tuple[int, ...]
    max_tokens: int
    end_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    sampling: bool = False
    temperature: float = 1.0
    top_k: int = 0  # 0 = no limit
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    beam_width: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 0.0  # TensorRT-LLM's default: the sum of log-probabilities decides
    early_stopping: bool | None = None
    log_probs: bool = False

    def sequence(self, index: int) -> EngineRequest:
        """The request of one of several sampled sequences: same prompt, seed + index."""
        return replace(self, num_return_sequences=1, seed=(self.seed + index) % 2**64)


def _number(message: dict[str, Any], name: str, default: float, kind: type = float) -> Any:
    value = message.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (kind is int and int(value) != value):
        raise RequestError(f"{name} is {value!r}; it must be a number")
    if value != value or value in (float("inf"), float("-inf")):
        raise RequestError(f"{name} is {value}; it must be finite")
    return kind(value)


def parse(message: dict[str, Any], limits: EngineLimits) -> EngineRequest:
    """EngineRequest from an "add" message; RequestError with both numbers where a limit is broken.

    max_tokens that does not fit into max_seq_len is cut to the room that is left (the generation then ends with reason
    "length"). Without top_k and top_p, or with temperature 0, generation is greedy, as in TensorRT-LLM; without a seed,
    sampling uses seed 0, as there.
    """
    ids = message.get("input_ids")
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RequestError("input_ids must be a list of integers")
    if not ids:
        raise RequestError("the prompt has no tokens")
    if len(ids) > limits.max_input_len:
        raise RequestError(f"prompt has {len(ids)} tokens, max_input_len is {limits.max_input_len}")
    for token in ids:
        if not 0 <= token < limits.vocab_size:
            raise RequestError(f"prompt has token id {token}, the vocabulary has ids 0 to {limits.vocab_size - 1}")
    room = limits.max_seq_len - len(ids)
    if room < 1:
        raise RequestError(f"prompt has {len(ids)} tokens, max_seq_len {limits.max_seq_len} leaves no room for output")
    max_tokens = _number(message, "max_tokens", room, int)
    if max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}; it must be at least 1")
    max_tokens = min(max_tokens, room)

    end_ids = message.get("end_ids")
    ends = frozenset(limits.end_ids if end_ids is None else [int(i) for i in end_ids])
    ends |= frozenset(int(i) for i in message.get("stop_token_ids") or ())
    min_tokens = _number(message, "min_tokens", 0, int)
    if min_tokens < 0:
        raise RequestError(f"min_tokens is {min_tokens}; it must not be negative")

    temperature = _number(message, "temperature", 1.0)
    if temperature < 0:
        raise RequestError(f"temperature is {temperature:g}; it must not be negative")
    top_k = _number(message, "top_k", 0, int)
    if top_k < 0:
        raise RequestError(f"top_k is {top_k}; it must not be negative (0 = no limit)")
    top_p = _number(message, "top_p", 0.0)
    if not 0.0 <= top_p <= 1.0:
        raise RequestError(f"top_p is {top_p:g}; it must lie between 0 and 1")
    repetition = _number(message, "repetition_penalty", 1.0)
    if repetition <= 0:
        raise RequestError(f"repetition_penalty is {repetition:g}; it must be above 0")
    seed = _number(message, "seed", 0, int)
    if not 0 <= seed < 2**64:
        raise RequestError(f"seed is {seed}; it must fit into 64 bits")

    beam_width = _number(message, "beam_width", 1, int)
    sequences = _number(message, "num_return_sequences", 1, int)
    if beam_width < 1 or sequences < 1:
        raise RequestError(f"beam_width is {beam_width} and num_return_sequences {sequences}; both must be at least 1")
    if beam_width > limits.max_beam_width:
        raise RequestError(f"beam_width is {beam_width}, max_beam_width is {limits.max_beam_width}")
    if beam_width > 1 and sequences > beam_width:
        raise RequestError(f"num_return_sequences is {sequences}, beam_width {beam_width} gives no more")
    if beam_width == 1 and sequences > limits.max_batch_size:
        raise RequestError(
            f"num_return_sequences is {sequences}, max_batch_size of the engine is {limits.max_batch_size}"
        )

    sampling = beam_width == 1 and temperature > 0 and top_k != 1 and (top_k > 1 or top_p > 0)
    return EngineRequest(
        input_ids=tuple(ids),
        max_tokens=max_tokens,
        end_ids=ends,
        # More than there is room for means: never end early.
        min_tokens=min(min_tokens, max_tokens),
        sampling=sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p if top_p > 0 else 1.0,
        repetition_penalty=repetition,
        presence_penalty=_number(message, "presence_penalty", 0.0),
        frequency_penalty=_number(message, "frequency_penalty", 0.0),
        seed=seed,
        beam_width=beam_width,
        num_return_sequences=sequences,
        length_penalty=_number(message, "length_penalty", 0.0),
        early_stopping=message.get("early_stopping"),
        log_probs=bool(message.get("log_probs")),
    )
