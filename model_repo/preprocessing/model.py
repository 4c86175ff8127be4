"""Triton Python model `preprocessing`: text to the token tensors of tensorrt_llm, with NVIDIA's names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tokenizer_files import TokenizerError, TokenizerFolder

MULTIMODAL = ("IMAGE_BYTES", "IMAGE_URL", "IMAGES", "VIDEO_BYTES")


class RequestError(Exception):
    """The request cannot be prepared; the text goes to the client."""


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        folder = Path(args["model_repository"]) / args["model_version"]
        self._add_special_tokens = parameters.get("add_special_tokens", {}).get("string_value", "true") == "true"
        try:
            self._tokenizer = TokenizerFolder(folder / parameters["tokenizer_dir"]["string_value"])
        except TokenizerError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                outputs = self._prepare({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            except (RequestError, TokenizerError) as error:
                failure = pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=failure))
                continue
            except Exception as error:  # whatever it is, it concerns this request and not the others of the batch
                failure = pb_utils.TritonError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
                responses.append(pb_utils.InferenceResponse(error=failure))
                continue
            tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses

    def _prepare(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        for name in MULTIMODAL:
            if name in inputs and inputs[name].size:
                raise RequestError(f"input {name} is not supported: only text models are served")
        query = inputs["QUERY"]
        texts = [_text(value) for value in query.reshape(-1)]
        lengths = inputs["REQUEST_OUTPUT_LEN"]
        _check_lengths(texts, lengths)
        end_id = self._id(inputs.get("END_ID"), len(texts), self._tokenizer.end_id)
        pad_id = self._id(inputs.get("PAD_ID"), len(texts), self._tokenizer.pad_id)
        padding = [int(value) for value in pad_id[:, 0]]
        ids, sizes = self._encode(texts, padding)
        decoder = [_text(value) for value in inputs["DECODER_QUERY"].reshape(-1)] if "DECODER_QUERY" in inputs else None
        if decoder is None:
            # A decoder-only model starts its decoder from nothing: one pad id, as the official layout sends it.
            decoder_ids, decoder_sizes = pad_id.copy(), np.ones((len(texts), 1), dtype=np.int32)
        else:
            decoder_ids, decoder_sizes = self._encode(decoder, padding)
        return {
            "INPUT_ID": ids,
            "REQUEST_INPUT_LEN": sizes,
            "DECODER_INPUT_ID": decoder_ids,
            "REQUEST_DECODER_INPUT_LEN": decoder_sizes,
            "BAD_WORDS_IDS": self._words(inputs.get("BAD_WORDS_DICT"), len(texts)),
            "STOP_WORDS_IDS": self._words(inputs.get("STOP_WORDS_DICT"), len(texts)),
            "EMBEDDING_BIAS": self._bias(inputs, len(texts)),
            "REQUEST_OUTPUT_LEN": lengths.astype(np.int32),
            "OUT_END_ID": end_id,
            "OUT_PAD_ID": pad_id,
            "OUT_PROMPT_TABLE_EXTRA_IDS": _extra_ids(inputs.get("PROMPT_TABLE_EXTRA_ID"), len(texts)),
        }

    def _encode(self, texts: list[str], padding: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids [rows, longest], padded on the right, and lengths [rows, 1]."""
        rows = [self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens) for text in texts]
        width = max(len(row) for row in rows)
        ids = np.zeros((len(rows), width), dtype=np.int32)
        for number, row in enumerate(rows):
            ids[number, :] = padding[number]
            ids[number, : len(row)] = row
        return ids, np.array([[len(row)] for row in rows], dtype=np.int32)

    def _id(self, given: np.ndarray | None, rows: int, default: int | None) -> np.ndarray:
        """END_ID or PAD_ID [rows, 1]: the request's, else the tokenizer's; -1 = there is none."""
        if given is not None and given.size:
            return np.broadcast_to(given.reshape(-1, 1), (rows, 1)).astype(np.int32)
        return np.full((rows, 1), -1 if default is None else default, dtype=np.int32)

    def _words(self, given: np.ndarray | None, rows: int) -> np.ndarray:
        """Official layout [rows, 2, n]: the words' ids one after the other (then 0), and where each ends (then -1).

        No word carries BOS; empty words are dropped.
        """
        words = [[] for _ in range(rows)] if given is None else [list(row) for row in given.reshape(given.shape[0], -1)]
        if len(words) == 1 and rows > 1:
            words = words * rows
        encoded = [[self._tokenizer.encode_word(w) for w in map(_text, row) if w] for row in words]
        width = max(max(sum(map(len, row)), len(row)) for row in encoded)
        result = np.zeros((rows, 2, width), dtype=np.int32)
        result[:, 1, :] = -1
        for number, row in enumerate(encoded):
            flat = [index for word in row for index in word]
            result[number, 0, : len(flat)] = flat
            result[number, 1, : len(row)] = np.cumsum([len(word) for word in row])
        return result

    def _bias(self, inputs: dict[str, np.ndarray], rows: int) -> np.ndarray:
        """Logit bias [rows, vocabulary], or [rows, 0] when none is asked for."""
        words, weights = inputs.get("EMBEDDING_BIAS_WORDS"), inputs.get("EMBEDDING_BIAS_WEIGHTS")
        if words is None and weights is None:
            return np.zeros((rows, 0), dtype=np.float32)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "EMBEDDING_BIAS_WORDS and EMBEDDING_BIAS_WEIGHTS must be given together, with equal shapes"
            )
        bias = np.zeros((rows, self._tokenizer.size), dtype=np.float32)
        for row in range(rows):
            source = row if words.shape[0] > 1 else 0
            for word, weight in zip(words[source].reshape(-1), weights[source].reshape(-1)):
                for index in self._tokenizer.encode_word(_text(word)):
                    bias[row, index] += weight
        return bias


def _text(value: Any) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"text is not UTF-8: {error}") from error


def _check_lengths(texts: list[str], lengths: np.ndarray) -> None:
    """Refuse max_tokens below 1 before anything is generated; zeros with an empty text are Triton's warm-up."""
    flat = lengths.reshape(-1).tolist()
    if len(flat) != len(texts):
        raise RequestError(f"max_tokens has {len(flat)} values for {len(texts)} prompts")
    for text, length in zip(texts, flat):
        if length < 1 and (text or length < 0):
            raise RequestError(f"max_tokens is {length}; it must be at least 1")


def _extra_ids(given: np.ndarray | None, rows: int) -> np.ndarray:
    if given is None:
        return np.zeros((rows, 0), dtype=np.uint64)
    return given.reshape(rows, -1).astype(np.uint64)
