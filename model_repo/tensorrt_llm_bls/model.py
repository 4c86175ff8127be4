"""Triton Python model `tensorrt_llm_bls`: the ensemble's steps called one after the other, with NVIDIA's tensors.

Streaming needs `exec(decoupled=True)`, which crashes Triton 2.51's stub on any Python but 3.11: the model is served
there only. Beside the ensemble it can accumulate tokens (exact text where tensorrt_llm does not make it) and passes a
cancellation on: as a stop request with the same request id, because Triton does not cancel child requests.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

# Our input -> (preprocessing's input).
PREPROCESSING_INPUTS = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
    "image_bytes_input": "IMAGE_BYTES",
    "image_url_input": "IMAGE_URL",
    "video_bytes_input": "VIDEO_BYTES",
}
# preprocessing's output -> tensorrt_llm's input.
PREPARED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "DECODER_INPUT_ID": "decoder_input_ids",
    "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "STOP_WORDS_IDS": "stop_words_list",
    "BAD_WORDS_IDS": "bad_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
    "OUT_PROMPT_TABLE_EXTRA_IDS": "prompt_table_extra_ids",
}
# Our input -> tensorrt_llm's input.
PASSED = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "return_log_probs": "return_log_probs",
    "return_context_logits": "return_context_logits",
    "return_generation_logits": "return_generation_logits",
    "return_perf_metrics": "return_perf_metrics",
    "return_num_input_tokens": "return_num_input_tokens",
    "return_num_output_tokens": "return_num_output_tokens",
    "num_return_sequences": "num_return_sequences",
    "beam_width": "beam_width",
    "exclude_input_in_output": "exclude_input_in_output",
    "prompt_embedding_table": "prompt_embedding_table",
    "prompt_vocab_size": "prompt_vocab_size",
    "lora_task_id": "lora_task_id",
    "lora_weights": "lora_weights",
    "lora_config": "lora_config",
    "guided_decoding_guide_type": "guided_decoding_guide_type",
    "guided_decoding_guide": "guided_decoding_guide",
}
# What only a speculative or multimodal repository has a model for.
REFUSED = ("num_draft_tokens", "use_draft_logits", "image_input")
# Outputs of tensorrt_llm that are not ours to show.
INTERNAL = ("output_ids", "sequence_length", "output_text")
CANCEL_POLL_SECONDS = 0.02


class BlsError(Exception):
    """A step failed; the text goes to the client."""


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._accumulate = parameters.get("accumulate_tokens", "false") == "true"
        self._model = parameters.get("tensorrt_llm_model_name", "tensorrt_llm")
        own = {output["name"] for output in config["output"]}
        self._forwarded = sorted(own - {"text_output"})
        self._numbers = itertools.count(1)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if not self._decoupled:
            return [self._unary(request) for request in requests]
        for request in requests:
            self._stream(request)
        return None

    def _unary(self, request: Any) -> Any:
        try:
            return next(self._answers(request, request.request_id()), pb_utils.InferenceResponse([]))
        except Exception as error:
            return pb_utils.InferenceResponse(error=_triton_error(error))

    def _stream(self, request: Any) -> None:
        sender = request.get_response_sender()
        # A stop request needs an id; the client need not have given one.
        identity = request.request_id() or f"bls-{os.getpid()}-{next(self._numbers)}"
        watcher = _CancelWatcher(sender, lambda: self._stop(identity))
        try:
            for response in self._answers(request, identity):
                watcher.send(response)
        except Exception as error:
            # Also of Triton itself (a step's model is not loaded): a stream that just ends would look like an answer.
            watcher.send(pb_utils.InferenceResponse(error=_triton_error(error)))
        finally:
            watcher.finish()

    def _stop(self, identity: str) -> None:
        zero = np.zeros((1, 1), dtype=np.int32)
        inputs = {"input_ids": zero, "input_lengths": zero, "request_output_len": zero, "stop": np.array([[True]])}
        for _ in self._call(self._model, inputs, ["output_ids"], identity, decoupled=self._decoupled):
            pass

    def _answers(self, request: Any, identity: str) -> Iterator[Any]:
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        for name in REFUSED:
            if name in given and np.any(given[name]):
                raise BlsError(f"input {name} is not supported: this repository has no draft or vision model")
        first = {PREPROCESSING_INPUTS[n]: _two_dimensions(v) for n, v in given.items() if n in PREPROCESSING_INPUTS}
        prepared = next(self._call("preprocessing", first, list(PREPARED), identity, decoupled=False))
        inputs = {theirs: prepared[ours] for ours, theirs in PREPARED.items() if ours in prepared}
        inputs |= {theirs: _two_dimensions(given[ours]) for ours, theirs in PASSED.items() if ours in given}
        outputs = ["output_ids", "sequence_length", "output_text", *self._forwarded]
        so_far = _Accumulated()
        for result in self._call(self._model, inputs, outputs, identity, decoupled=self._decoupled):
            if "output_ids" not in result:
                continue
            text = self._text(result, so_far, identity)
            tensors = {"text_output": text} | {n: v for n, v in result.items() if n not in INTERNAL}
            yield pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])

    def _text(self, result: dict[str, np.ndarray], so_far: _Accumulated, identity: str) -> np.ndarray:
        """Text of one response: made by tensorrt_llm, else decoded, of all tokens so far when accumulating."""
        if "output_text" in result:
            text = result["output_text"].reshape(-1)
            return so_far.add_text(result, text) if self._accumulate else text
        ids, lengths = result["output_ids"], result["sequence_length"]
        if self._accumulate:
            ids, lengths = so_far.add_ids(result)
        inputs = {"TOKENS_BATCH": ids, "SEQUENCE_LENGTH": lengths}
        return next(self._call("postprocessing", inputs, ["OUTPUT"], identity, decoupled=False))["OUTPUT"]

    def _call(
        self, model: str, inputs: dict[str, np.ndarray], outputs: list[str], identity: str, *, decoupled: bool
    ) -> Iterator[dict[str, np.ndarray]]:
        tensors = [pb_utils.Tensor(name, value) for name, value in inputs.items()]
        request = pb_utils.InferenceRequest(
            model_name=model, inputs=tensors, requested_output_names=outputs, request_id=identity
        )
        answer = request.exec(decoupled=True) if decoupled else [request.exec()]
        for response in answer:
            if response.has_error():
                raise BlsError(response.error().message())
            yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}


def _triton_error(error: Exception) -> Any:
    if isinstance(error, BlsError):
        return pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG)
    return pb_utils.TritonError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)


def _two_dimensions(value: np.ndarray) -> np.ndarray:
    """Inputs with `reshape []` arrive as [rows]; the called model wants [rows, 1]."""
    return value.reshape(-1, 1) if value.ndim == 1 else value


class _Accumulated:
    """What came so far, per batch row and sequence of one request."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], np.ndarray] = {}
        self._text: dict[tuple[int, int], bytes] = {}

    @staticmethod
    def _key(result: dict[str, np.ndarray]) -> tuple[int, int]:
        def first(name: str) -> int:
            return int(result[name].reshape(-1)[0]) if name in result else 0

        return first("batch_index"), first("sequence_index")

    def add_ids(self, result: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        key = self._key(result)
        new = result["output_ids"]
        if key in self._ids:
            new = np.concatenate([self._ids[key], new], axis=-1)
        self._ids[key] = new
        return new, np.full(new.shape[:2], new.shape[-1], dtype=np.int32)

    def add_text(self, result: dict[str, np.ndarray], text: np.ndarray) -> np.ndarray:
        key = self._key(result)
        if text.size != 1:
            return text
        self._text[key] = self._text.get(key, b"") + text[0]
        return np.array([self._text[key]], dtype=object)


class _CancelWatcher:
    """Looks for the client's cancellation while the answer is on its way, and stops the generation once."""

    def __init__(self, sender: Any, stop: Any) -> None:
        self._sender = sender
        self._stop = stop
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(CANCEL_POLL_SECONDS):
            with self._lock:
                # The sender must not be touched after its final flag.
                if self._done.is_set() or not self._sender.is_cancelled():
                    continue
            self._stop()
            return

    def send(self, response: Any) -> None:
        with self._lock:
            self._sender.send(response)

    def finish(self) -> None:
        with self._lock:
            self._done.set()
            self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        self._thread.join()
