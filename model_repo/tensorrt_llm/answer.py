"""The answer to one Triton request: tokens from the engine become responses, deltas or whole, until the final flag."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from detokenizer import Vocabulary, decode
from engine_client import EngineClient, EngineError
from generation_text import GenerationText, Piece
from request_inputs import AnswerOptions, PromptRequest

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


@dataclass
class _Sequence:
    text: GenerationText
    whole: Piece = field(default_factory=Piece)
    log_prob: float = 0.0
    ended: bool = False
    answered: bool = False

    def take(self, piece: Piece) -> None:
        self.whole.text += piece.text
        self.whole.ids += piece.ids
        self.whole.log_probs += piece.log_probs
        self.log_prob += sum(piece.log_probs)


@dataclass
class _Row:
    request: PromptRequest
    sequences: list[_Sequence]
    identity: int | None = None
    first_token_ns: int = 0
    last_token_ns: int = 0
    sent_ns: int = 0


class Answer:
    """Engine messages arrive in the client's reader thread, cancellation in a poller's: one lock serialises them.

    Triton frees a request's response factory with the final flag, so its sender is touched only while not `finished`.
    """

    def __init__(
        self,
        engine: EngineClient,
        vocabulary: Vocabulary,
        sender: Any,
        rows: list[PromptRequest],
        options: AnswerOptions,
        *,
        decoupled: bool,
        skip_special_tokens: bool,
        tag: str,
        requested: frozenset[str],
        on_finished: Callable[[Answer], None],
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._sender = sender
        self._options = options
        self._decoupled = decoupled
        self._skip_special_tokens = skip_special_tokens
        self._requested = requested
        self._on_finished = on_finished
        self._arrival_ns = time.monotonic_ns()
        self._lock = threading.RLock()
        self._rows = [
            _Row(
                row,
                [
                    _Sequence(GenerationText(vocabulary, row.stop_words, skip_special_tokens=skip_special_tokens))
                    for _ in range(row.sequences)
                ],
            )
            for row in rows
        ]
        self.tag = tag
        self.finished = False
        self._cancelled = False

    def start(self) -> None:
        """Hand the rows to the engine; an engine that cannot be reached becomes an error response."""
        with self._lock:
            for row in self._rows:
                if self.finished:
                    return
                message = {**row.request.message, "tag": self.tag} if self.tag else row.request.message
                row.sent_ns = time.monotonic_ns()
                try:
                    row.identity = self._engine.add(message, lambda m, row=row: self._receive(row, m))
                except EngineError as error:
                    self._cancel_rows()
                    self._fail(str(error), pb_utils.TritonError.UNAVAILABLE)
                except Exception as error:
                    self._cancel_rows()
                    self._fail(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def poll_cancelled(self) -> None:
        """Pass Triton's cancellation on to the engine, once."""
        with self._lock:
            if self.finished or self._cancelled or not self._sender.is_cancelled():
                return
            self._cancelled = True
            self._cancel_rows()

    def _cancel_rows(self) -> None:
        for row in self._rows:
            if row.identity is not None:
                self._engine.cancel(row.identity)

    def _receive(self, row: _Row, message: dict[str, Any]) -> None:
        with self._lock:
            if self.finished:
                return
            try:
                if message["op"] == "tokens":
                    self._tokens(row, message["sequences"])
                elif message["op"] == "end":
                    self._end(row, message)
            except Exception as error:
                # The client may be gone (send raises); nothing else would ever end this request.
                self._cancel_rows()
                self._fail(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)

    def _tokens(self, row: _Row, entries: list[dict[str, Any]]) -> None:
        row.last_token_ns = time.monotonic_ns()
        row.first_token_ns = row.first_token_ns or row.last_token_ns
        for entry in entries:
            index = entry["index"]
            sequence = row.sequences[index]
            if sequence.ended:
                continue
            piece = sequence.text.feed(entry["ids"], entry.get("log_probs", ()))
            if not sequence.text.stopped:
                self._show(row, index, piece)
                continue
            if row.identity is not None and row.request.beam_width == 1:
                # The only sequence, or one of several: the others go on.
                self._engine.cancel(row.identity, index)
            self._finish_sequence(row, index, piece)

    def _end(self, row: _Row, message: dict[str, Any]) -> None:
        if message["reason"] == "error":
            self._cancel_rows()
            self._fail(message.get("message", "the engine gave no reason"), pb_utils.TritonError.INVALID_ARG)
            return
        index = message.get("index")
        alone = index is None or row.request.beam_width > 1
        for number, sequence in enumerate(row.sequences):
            if not sequence.ended and (alone or number == index):
                self._finish_sequence(row, number, sequence.text.finish())

    def _show(self, row: _Row, index: int, piece: Piece) -> None:
        sequence = row.sequences[index]
        sequence.take(piece)
        if self._options.streaming and piece:
            sequence.answered = True
            self._sender.send(self._response([row], [[(sequence, piece)]], index))

    def _finish_sequence(self, row: _Row, index: int, piece: Piece) -> None:
        sequence = row.sequences[index]
        sequence.take(piece)
        sequence.ended = True
        last = all(s.ended for r in self._rows for s in r.sequences)
        response = None
        if not self._decoupled:
            if last:
                shown = [[(s, self._whole(r, s)) for s in r.sequences] for r in self._rows]
                response = self._response(self._rows, shown, 0)
        elif row.request.beam_width > 1:
            if all(s.ended for s in row.sequences):
                response = self._response([row], [[(s, self._whole(row, s)) for s in row.sequences]], 0)
        elif not self._options.streaming:
            response = self._response([row], [[(sequence, self._whole(row, sequence))]], index)
        elif piece or not sequence.answered:
            response = self._response([row], [[(sequence, piece)]], index)
        if last:
            self._close(response)
        elif response is not None:
            self._sender.send(response)

    def _close(self, response: Any | None) -> None:
        if self._cancelled and not self._decoupled:
            error = pb_utils.TritonError("the request was cancelled", pb_utils.TritonError.CANCELLED)
            response = pb_utils.InferenceResponse(error=error)
        self._send_last(response)

    def _fail(self, text: str, code: Any) -> None:
        if not self.finished:
            self._send_last(pb_utils.InferenceResponse(error=pb_utils.TritonError(text, code)))

    def _send_last(self, response: Any | None) -> None:
        self.finished = True
        try:
            if response is None:
                self._sender.send(flags=FINAL)
            else:
                self._sender.send(response, flags=FINAL)
        except Exception as error:
            # Nobody is left to tell, and whoever called serves the other requests too.
            sys.stderr.write(f"tensorrt_llm: an answer could not be sent: {error}\n")
        finally:
            self._on_finished(self)

    def _whole(self, row: _Row, sequence: _Sequence) -> Piece:
        """A sequence as a whole answer: with the prompt in front, unless that is excluded."""
        whole = sequence.whole
        if self._options.exclude_input:
            return whole
        prompt = row.request.prompt
        # Spaces between prompt and answer depend on both: decode them together, then cut what the stop word cut.
        skip = self._skip_special_tokens
        text = decode(self._vocabulary, prompt + whole.ids, skip_special_tokens=skip)
        cut = len(decode(self._vocabulary, whole.ids, skip_special_tokens=skip)) - len(whole.text)
        return Piece(text[: len(text) - cut] if cut else text, prompt + whole.ids, whole.log_probs)

    def _response(self, rows: list[_Row], shown: list[list[tuple[_Sequence, Piece]]], index: int) -> Any:
        """Official tensors; `shown` is [rows][beams or sequences], padded to the longest."""
        options = self._options
        width = max(len(piece.ids) for row in shown for _, piece in row)
        beams = max(len(row) for row in shown)
        ids = np.full((len(rows), beams, width), options.pad_id, dtype=np.int32)
        lengths = np.zeros((len(rows), beams), dtype=np.int32)
        texts = np.full((len(rows), beams), b"", dtype=object)
        for r, row_shown in enumerate(shown):
            for b, (_, piece) in enumerate(row_shown):
                ids[r, b, : len(piece.ids)] = piece.ids
                lengths[r, b] = len(piece.ids)
                texts[r, b] = piece.text.encode()
        tensors = {"output_ids": ids, "sequence_length": lengths, "output_text": texts}
        if self._decoupled:
            tensors["batch_index"] = np.array([[self._rows.index(rows[0])]], dtype=np.int32)
            tensors["sequence_index"] = np.array([[index]], dtype=np.int32)
        if options.log_probs:
            tensors |= _log_probs(shown, beams)
        if options.num_input_tokens:
            tensors["num_input_tokens"] = np.array([[len(row.request.prompt)] for row in rows], dtype=np.int32)
        if options.num_output_tokens:
            # Of this response: a client adds the responses of a stream up.
            counts = [sum(self._generated(row, piece) for _, piece in s) for row, s in zip(rows, shown)]
            tensors["num_output_tokens"] = np.array([[count] for count in counts], dtype=np.int32)
        if options.perf_metrics:
            tensors |= self._perf_metrics(rows)
        # Every tensor costs the server time per token: send what somebody reads.
        wanted = [pb_utils.Tensor(name, value) for name, value in tensors.items() if name in self._requested]
        return pb_utils.InferenceResponse(wanted)

    def _generated(self, row: _Row, piece: Piece) -> int:
        with_prompt = not self._options.streaming and not self._options.exclude_input
        return len(piece.ids) - (len(row.request.prompt) if with_prompt else 0)

    def _perf_metrics(self, rows: list[_Row]) -> dict[str, np.ndarray]:
        def column(values: list[int], dtype: Any = np.int64) -> np.ndarray:
            return np.array([[value] for value in values], dtype=dtype)

        ones = [1] * len(rows)
        # Monotonic clock. The engine does not tell when it scheduled a request: the time at which it was handed over.
        times = {
            "arrival_time_ns": column([self._arrival_ns for _ in rows]),
            "first_scheduled_time_ns": column([row.sent_ns for row in rows]),
            "first_token_time_ns": column([row.first_token_ns for row in rows]),
            "last_token_time_ns": column([row.last_token_ns for row in rows]),
        }
        # Not measured by the engine; clients read the tensors whenever they asked for metrics.
        unknown = column([-one for one in ones], np.int32)
        none = column([0 * one for one in ones], np.int32)
        return times | {
            "kv_cache_alloc_new_blocks": unknown,
            "kv_cache_reused_blocks": unknown,
            "kv_cache_alloc_total_blocks": unknown,
            "acceptance_rate": none.astype(np.float32),
            "total_accepted_draft_tokens": none,
            "total_draft_tokens": none,
        }


def _log_probs(shown: list[list[tuple[_Sequence, Piece]]], beams: int) -> dict[str, np.ndarray]:
    width = max(len(piece.log_probs) for row in shown for _, piece in row)
    each = np.zeros((len(shown), beams, width), dtype=np.float32)
    total = np.zeros((len(shown), beams), dtype=np.float32)
    for r, row_shown in enumerate(shown):
        for b, (sequence, piece) in enumerate(row_shown):
            each[r, b, : len(piece.log_probs)] = piece.log_probs
            total[r, b] = sequence.log_prob
    return {"cum_log_probs": total, "output_log_probs": each}
