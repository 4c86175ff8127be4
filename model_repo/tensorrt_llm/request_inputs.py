"""Official request tensors to engine requests; whatever this backend cannot do is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from detokenizer import Vocabulary, decode
from engine_request import EngineLimits, RequestError, parse

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class PromptRequest:
    """One row of a request: what goes to the engine, and how its answer is shown."""

    message: dict[str, Any]
    prompt: list[int]
    stop_words: tuple[str, ...]
    beam_width: int
    sequences: int
    max_tokens: int


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are shown; the same for all rows of a request."""

    streaming: bool = False
    exclude_input: bool = False
    log_probs: bool = False
    perf_metrics: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    pad_id: int = 0


class InputTable:
    """tensors.json: which inputs a backend honours."""

    def __init__(self, path: Path, backend: str) -> None:
        table = json.loads(path.read_text(encoding="utf-8"))
        self.backend = backend
        self.names = [entry["name"] for entry in table["inputs"]]
        self._refused = {e["name"]: e for e in table["inputs"] if e["backends"][backend].startswith("refused")}

    def check(self, tensors: Tensors) -> None:
        """RequestError naming the first refused tensor that asks for something, and the backends that honour it."""
        for name in tensors.keys() & self._refused.keys():
            entry = self._refused[name]
            neutral = [self._neutral_value(value, tensors) for value in entry.get("neutral", ())]
            if all(_plain(value) in neutral for value in np.ravel(tensors[name])):
                continue
            able = [b for b, state in entry["backends"].items() if state.startswith("honoured")]
            client = entry.get("client")
            shown = name if client in (None, name) else f"{name} ({client})"
            raise RequestError(
                f"input {shown} is not supported by backend {self.backend}; "
                + (f"it is by {', '.join(able)}" if able else "no backend of lpx supports it")
            )

    @staticmethod
    def _neutral_value(value: Any, tensors: Tensors) -> Any:
        if value == "pad_id":
            pad = tensors.get("pad_id")
            return None if pad is None or not pad.size else int(np.ravel(pad)[0])
        return value


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _row_value(tensors: Tensors, name: str, row: int) -> Any:
    """Scalar of one row; a tensor with a single value serves all rows."""
    tensor = tensors.get(name)
    if tensor is None or not tensor.size:
        return None
    flat = np.ravel(tensor)
    return flat[row if flat.size > 1 else 0].item()


def _flag(tensors: Tensors, name: str, default: bool = False) -> bool:
    value = _row_value(tensors, name, 0)
    return default if value is None else bool(value)


def is_warm_up(tensors: Tensors) -> bool:
    """Triton's warm-up sends zeros: nothing to read and nothing to write."""
    return not np.any(tensors["input_lengths"]) and not np.any(tensors["request_output_len"])


def read_options(tensors: Tensors, *, exclude_input: bool, pad_id: int) -> AnswerOptions:
    """Flags of a request; `exclude_input` and `pad_id` are the model's own defaults."""
    pad = _row_value(tensors, "pad_id", 0)
    return AnswerOptions(
        streaming=_flag(tensors, "streaming"),
        exclude_input=_flag(tensors, "exclude_input_in_output", exclude_input),
        log_probs=_flag(tensors, "return_log_probs"),
        perf_metrics=_flag(tensors, "return_perf_metrics"),
        num_input_tokens=_flag(tensors, "return_num_input_tokens"),
        num_output_tokens=_flag(tensors, "return_num_output_tokens"),
        pad_id=pad_id if pad is None or pad < 0 else int(pad),
    )


def word_lists(array: np.ndarray) -> list[list[int]]:
    """Words of an official [2, n] list: ids one after the other, and the offset at which each word ends (then -1)."""
    if array.ndim != 2 or array.shape[0] != 2:
        raise RequestError(f"stop_words_list has shape {list(array.shape)}; it must be [2, n]: ids and offsets")
    words, start = [], 0
    for end in array[1].tolist():
        if end <= start:
            break
        if end > array.shape[1]:
            raise RequestError(f"stop_words_list has the offset {end} beyond its {array.shape[1]} ids")
        words.append(array[0, start:end].tolist())
        start = end
    return words


def _stop_words(tensors: Tensors, row: int, vocabulary: Vocabulary) -> tuple[tuple[str, ...], list[int]]:
    """Stop words as text, and those that are one special token as ids (their text never appears)."""
    array = tensors.get("stop_words_list")
    if array is None or not array.size:
        return (), []
    if array.ndim == 3:
        array = array[row if array.shape[0] > 1 else 0]
    texts, ids = [], []
    for word in word_lists(array):
        special = [i for i in word if i in vocabulary.special_ids]
        if special and len(word) > 1:
            shown = decode(vocabulary, word, skip_special_tokens=False)
            raise RequestError(f"stop word {shown!r} mixes special tokens and text; send the special token alone")
        if special:
            ids += word
        else:
            texts.append(decode(vocabulary, word, skip_special_tokens=False))
    return tuple(texts), ids


def _count(tensors: Tensors, name: str, row: int) -> int:
    """A count that is 1 where it is not given."""
    value = _row_value(tensors, name, row)
    if value is None:
        return 1
    if value < 1:
        raise RequestError(f"{name} is {value}; it must be at least 1")
    return int(value)


def read_rows(tensors: Tensors, limits: EngineLimits, vocabulary: Vocabulary) -> list[PromptRequest]:
    """The prompts of a request, checked against the engine's limits. Raises RequestError."""
    if "input_ids" not in tensors:
        raise RequestError("input input_ids is required by this backend")
    ids = tensors["input_ids"]
    ids = ids.reshape(1, -1) if ids.ndim == 1 else ids
    lengths = np.ravel(tensors["input_lengths"]).tolist()
    if len(lengths) != ids.shape[0]:
        raise RequestError(f"input_lengths has {len(lengths)} values for {ids.shape[0]} rows of input_ids")
    rows = []
    for row, length in enumerate(lengths):
        if not 0 <= length <= ids.shape[1]:
            raise RequestError(f"input_lengths is {length}, input_ids has {ids.shape[1]} columns")
        rows.append(_read_row(tensors, row, ids[row, :length].tolist(), limits, vocabulary))
    return rows


def _read_row(
    tensors: Tensors, row: int, prompt: list[int], limits: EngineLimits, vocabulary: Vocabulary
) -> PromptRequest:
    texts, special = _stop_words(tensors, row, vocabulary)
    end_id = _row_value(tensors, "end_id", row)
    # end_id adds to the engine's own set; -1 means, as in TensorRT-LLM, that no id ends the generation.
    ends = [] if end_id == -1 else sorted({*limits.end_ids, *([] if end_id is None else [int(end_id)])})
    beam_width = _count(tensors, "beam_width", row)
    sequences = _count(tensors, "num_return_sequences", row)
    if beam_width > 1 and sequences > 1:
        raise RequestError(
            f"num_return_sequences is {sequences} with beam_width {beam_width}; a beam search returns its beams, "
            "leave num_return_sequences out"
        )
    if beam_width > 1 and _flag(tensors, "streaming"):
        raise RequestError(
            f"streaming with beam_width {beam_width}: beams are known only at the end; set streaming false"
        )
    message = {
        "input_ids": prompt,
        "max_tokens": _row_value(tensors, "request_output_len", row),
        "end_ids": sorted({*ends, *special}),
        "min_tokens": _row_value(tensors, "min_tokens", row),
        "temperature": _row_value(tensors, "temperature", row),
        "top_k": _row_value(tensors, "runtime_top_k", row),
        "top_p": _row_value(tensors, "runtime_top_p", row),
        "repetition_penalty": _row_value(tensors, "repetition_penalty", row),
        "presence_penalty": _row_value(tensors, "presence_penalty", row),
        "frequency_penalty": _row_value(tensors, "frequency_penalty", row),
        "seed": _row_value(tensors, "seed", row),
        "beam_width": beam_width,
        "num_return_sequences": beam_width if beam_width > 1 else sequences,
        "length_penalty": _row_value(tensors, "len_penalty", row),
        "early_stopping": _row_value(tensors, "early_stopping", row),
        "log_probs": _flag(tensors, "return_log_probs"),
    }
    message = {name: value for name, value in message.items() if value is not None}
    request = parse(message, limits)
    return PromptRequest(message, prompt, texts, beam_width, request.num_return_sequences, request.max_tokens)
