"""Triton Python model `tensorrt_llm` with NVIDIA's tensors, in front of an engine host (engine_host.py).

Decoupled: any number of responses per request; a batch of B is answered by batch-1 responses that batch_index and
sequence_index tag. Not decoupled: one response per request. Either way `execute` only hands requests over, so that
they join the running batch. A request with `stop` true ends those with the same request id.
"""

from __future__ import annotations

import json
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from answer import FINAL, Answer
from detokenizer import Vocabulary
from engine_client import EngineClient, EngineError
from engine_request import EngineLimits, RequestError
from request_inputs import InputTable, Tensors, is_warm_up, read_options, read_rows

BACKEND = "openvino"
CANCEL_POLL_SECONDS = 0.02


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"]) / args["model_version"]
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._exclude_input = parameters.get("exclude_input_in_output", "false") == "true"
        self._skip_special_tokens = parameters.get("skip_special_tokens", "true") == "true"
        self._vocabulary = Vocabulary.load(folder / parameters["tokenizer_dir"])
        self._table = InputTable(Path(__file__).resolve().parent / "tensors.json", BACKEND)
        self._engine = EngineClient(folder / parameters["gpt_model_path"], python=parameters.get("engine_python", ""))
        try:
            limits = EngineLimits.from_description(self._engine.open())
        except EngineError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        # The repository may allow less than the engine was built for, not more.
        beams = int(parameters.get("max_beam_width", limits.max_beam_width))
        self._limits = replace(limits, max_beam_width=min(beams, limits.max_beam_width))
        self._answers: set[Answer] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._working = threading.Event()
        threading.Thread(target=self._watch_cancellation, daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._begin(request, sender)
            except RequestError as error:
                _send_error(sender, str(error), pb_utils.TritonError.INVALID_ARG)
            except Exception as error:  # the request must end, whatever happened
                _send_error(sender, f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def _begin(self, request: Any, sender: Any) -> None:
        tensors: Tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        stop = tensors.get("stop")
        if stop is not None and stop.any():
            self._stop(request.request_id())
            _send_empty(sender, decoupled=self._decoupled)
            return
        if is_warm_up(tensors):
            _send_empty(sender, decoupled=self._decoupled)
            return
        self._table.check(tensors)
        options = read_options(tensors, exclude_input=self._exclude_input, pad_id=self._limits.pad_id)
        if options.streaming and not self._decoupled:
            raise RequestError("streaming needs a repository built with serve.streaming: true (decoupled)")
        answer = Answer(
            self._engine,
            self._vocabulary,
            sender,
            read_rows(tensors, self._limits, self._vocabulary),
            options,
            decoupled=self._decoupled,
            skip_special_tokens=self._skip_special_tokens,
            tag=request.request_id(),
            requested=frozenset(request.requested_output_names()),
            on_finished=self._forget,
        )
        with self._lock:
            self._answers.add(answer)
        self._working.set()
        answer.start()

    def _stop(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("stop needs the request id of the request to stop")
        self._engine.cancel_tagged(request_id)

    def _forget(self, answer: Answer) -> None:
        with self._lock:
            self._answers.discard(answer)
            if not self._answers:
                self._working.clear()

    def _watch_cancellation(self) -> None:
        while not self._closing.is_set():
            self._working.wait()
            with self._lock:
                answers = list(self._answers)
            for answer in answers:
                try:
                    answer.poll_cancelled()
                except Exception:  # without this thread no cancellation would ever arrive again
                    traceback.print_exc()
                    self._forget(answer)
            self._closing.wait(CANCEL_POLL_SECONDS)

    def finalize(self) -> None:
        self._closing.set()
        self._working.set()
        self._engine.close()


def _send_empty(sender: Any, *, decoupled: bool) -> None:
    if decoupled:
        sender.send(flags=FINAL)
    else:
        sender.send(pb_utils.InferenceResponse([]), flags=FINAL)


def _send_error(sender: Any, text: str, code: Any) -> None:
    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code)), flags=FINAL)
