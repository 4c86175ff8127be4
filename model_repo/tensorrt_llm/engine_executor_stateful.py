"""One request after the other over a stateful graph: OpenVINO GenAI's LLMPipeline with its SDPA attention.

For attention that the paged pipeline does not execute exactly (soft-cap, ALiBi). The library's loop runs in a thread of
its own and lets Python run meanwhile; what it streams is handed over by `step`.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from engine_executor import Event, SequenceTokens, generation_config, library_words, split_end
from engine_request import REASON_CANCELLED, REASON_ERROR, REASON_LENGTH, REASON_STOP, EngineRequest, RequestError

_PATIENCE = 0.02  # seconds that `step` waits for the next token: sockets are looked at in between


class StatefulExecutor:
    """Requests queue up; the KV cache of the one that runs is the graph's state."""

    def __init__(self, engine: Path, description: dict[str, Any]) -> None:
        import openvino_genai

        self._pipeline = openvino_genai.LLMPipeline(
            str(engine), "CPU", ATTENTION_BACKEND="SDPA", **dict(description.get("properties", {}))
        )
        self._streamer = _streamer_class()
        self._waiting: deque[tuple[Hashable, EngineRequest, Any]] = deque()
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._current: Hashable | None = None
        self._cancelled: set[Hashable] = set()
        self._open = 0  # requests whose last event has not been handed over
        self._closing = False
        self._thread = threading.Thread(target=self._loop, name="stateful-executor", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._open > 0

    def add(self, key: Hashable, request: EngineRequest) -> None:
        if request.log_probs:
            raise RequestError(
                "return_log_probs: this engine runs on the stateful executor (soft-cap or ALiBi attention), whose "
                "library does not hand out log-probabilities"
            )
        config = generation_config(request)
        with self._changed:
            self._waiting.append((key, request, config))
            self._open += 1
            self._changed.notify()

    def cancel(self, key: Hashable) -> None:
        with self._changed:
            for entry in self._waiting:
                if entry[0] == key:
                    self._waiting.remove(entry)
                    self._events.put(Event(key, reason=REASON_CANCELLED))
                    return
            if key == self._current:
                self._cancelled.add(key)  # the streamer ends it before the next token

    def step(self) -> list[Event]:
        if not self.busy:
            return []
        events: list[Event] = []
        try:
            events.append(self._events.get(timeout=_PATIENCE))
            while True:
                events.append(self._events.get_nowait())
        except queue.Empty:
            pass
        self._open -= sum(event.reason is not None for event in events)
        return events

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._waiting.clear()
            self._changed.notify()
        self._thread.join()

    # The thread

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                key, request, config = self._waiting.popleft()
                self._current = key
            try:
                event = self._run(key, request, config)
            except Exception as error:  # whatever the library raises belongs to this request alone
                event = Event(key, reason=REASON_ERROR, message=library_words(error))
            with self._changed:
                self._current = None
                self._cancelled.discard(key)
            self._events.put(event)

    def _run(self, key: Hashable, request: EngineRequest, config: Any) -> Event:
        import numpy
        import openvino

        ids = openvino.Tensor(numpy.array([request.input_ids], dtype=numpy.int64))
        if request.beam_width > 1:
            results = self._pipeline.generate(ids, config)
            return self._beams(key, request, results)
        seen: list[int] = []
        told = 0

        def take(tokens: list[int]) -> bool:
            """Pass new tokens on; whether to go on."""
            nonlocal told
            if self._closing or key in self._cancelled:
                return False
            seen.extend(tokens)
            kept, _ = split_end(seen, request.end_ids)
            if len(kept) > told:
                self._events.put(Event(key, [SequenceTokens(0, kept[told:], [])]))
                told = len(kept)
            return True

        results = self._pipeline.generate(ids, config, self._streamer(take))
        if key in self._cancelled or self._closing:
            return Event(key, reason=REASON_CANCELLED)
        kept, stopped = split_end(list(results.tokens[0]), request.end_ids)
        rest = [SequenceTokens(0, kept[told:], [])] if len(kept) > told else []
        return Event(key, rest, REASON_STOP if stopped else REASON_LENGTH)

    def _beams(self, key: Hashable, request: EngineRequest, results: Any) -> Event:
        if key in self._cancelled or self._closing:
            return Event(key, reason=REASON_CANCELLED)
        order = sorted(range(len(results.tokens)), key=lambda index: -results.scores[index])
        sequences, all_stopped = [], True
        for index, place in enumerate(order[: request.num_return_sequences]):
            kept, stopped = split_end(list(results.tokens[place]), request.end_ids)
            all_stopped = all_stopped and stopped
            sequences.append(SequenceTokens(index, kept, []))
        return Event(key, sequences, REASON_STOP if all_stopped else REASON_LENGTH)


def _streamer_class() -> type:
    """A streamer that hands ids to a function; its base class needs the library, which is loaded late."""
    import openvino_genai

    class Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
        def __init__(self, take: Any) -> None:
            super().__init__()
            self._take = take

        def write(self, token: int | list[int]) -> Any:
            status = openvino_genai.StreamingStatus
            return status.RUNNING if self._take([token] if isinstance(token, int) else list(token)) else status.CANCEL

        def end(self) -> None:
            """Nothing is held back."""

    return Streamer
