"""In-flight batching with a paged KV cache: OpenVINO GenAI's ContinuousBatchingPipeline."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from engine_executor import Event, SequenceTokens, generation_config, library_words, split_end
from engine_request import REASON_CANCELLED, REASON_ERROR, REASON_LENGTH, REASON_STOP, EngineRequest, RequestError


class _Running:
    __slots__ = ("cancelled", "handle", "request")

    def __init__(self, handle: Any, request: EngineRequest) -> None:
        self.handle = handle  # dropping the handle would silently drop the request
        self.request = request
        self.cancelled = False


class PagedExecutor:
    """`step` holds the GIL for one forward pass of the whole batch; nothing else runs in this process meanwhile."""

    def __init__(self, engine: Path, description: dict[str, Any]) -> None:
        import openvino_genai

        settings = description["scheduler"]
        scheduler = openvino_genai.SchedulerConfig()
        # Blocks, because the library's cache_size counts whole GiB; the memory behind them grows lazily.
        scheduler.cache_size = 0
        scheduler.num_kv_blocks = int(settings["num_kv_blocks"])
        scheduler.max_num_batched_tokens = int(settings["max_num_batched_tokens"])
        # The library heeds max_num_seqs only without dynamic_split_fuse, and counts beams: places are kept here.
        self._places = int(settings["max_num_seqs"])
        scheduler.max_num_seqs = self._places * max(1, int(description["limits"].get("max_beam_width", 1)))
        scheduler.enable_prefix_caching = bool(settings["enable_prefix_caching"])
        scheduler.dynamic_split_fuse = bool(settings["dynamic_split_fuse"])
        self._blocks = scheduler.num_kv_blocks
        # A longer prompt would make `step` fail for everybody.
        self._longest = None if scheduler.dynamic_split_fuse else scheduler.max_num_batched_tokens
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(engine), scheduler, "CPU", dict(description.get("properties", {}))
        )
        self._ignored = openvino_genai.GenerationStatus.IGNORED
        self._unfinished = openvino_genai.GenerationStatus.RUNNING
        self._running: dict[Hashable, _Running] = {}
        self._waiting: dict[Hashable, tuple[EngineRequest, Any]] = {}  # first come, first served
        self._gone: list[Event] = []  # cancelled before they had a place
        self._count = 0

    @property
    def busy(self) -> bool:
        return bool(self._running or self._waiting or self._gone)

    def add(self, key: Hashable, request: EngineRequest) -> None:
        if self._longest is not None and len(request.input_ids) > self._longest:
            raise RequestError(
                f"prompt has {len(request.input_ids)} tokens, max_num_tokens is {self._longest} and chunked context off"
            )
        config = generation_config(request)
        if self._waiting or len(self._running) >= self._places:
            self._waiting[key] = (request, config)
        else:
            self._start(key, request, config)

    def _start(self, key: Hashable, request: EngineRequest, config: Any) -> None:
        import numpy
        import openvino

        ids = openvino.Tensor(numpy.array([request.input_ids], dtype=numpy.int64))
        self._count += 1
        try:
            handle = self._pipeline.add_request(self._count, ids, config)
        except RuntimeError as error:
            raise RequestError(library_words(error)) from error
        self._running[key] = _Running(handle, request)

    def cancel(self, key: Hashable) -> None:
        if self._waiting.pop(key, None) is not None:
            self._gone.append(Event(key, reason=REASON_CANCELLED))
            return
        running = self._running.get(key)
        if running is not None and not running.cancelled:
            running.cancelled = True
            running.handle.cancel()

    def step(self) -> list[Event]:
        events, self._gone = self._gone, []
        for key, (request, config) in list(self._waiting.items())[: self._places - len(self._running)]:
            del self._waiting[key]
            try:
                self._start(key, request, config)
            except RequestError as error:
                events.append(Event(key, reason=REASON_ERROR, message=str(error)))
        if not self._running:
            return events
        # A cancelled request gives its blocks back in the next step, so step even when only such are left.
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        for key, running in list(self._running.items()):
            event = Event(key, reason=REASON_CANCELLED) if running.cancelled else self._read(key, running)
            if event is None:
                continue
            events.append(event)
            if event.reason is not None:
                del self._running[key]
        return events

    def _read(self, key: Hashable, running: _Running) -> Event | None:
        handle, request = running.handle, running.request
        outputs: list[Any] = []
        while handle.can_read():
            outputs.append(handle.read())
        if request.beam_width > 1:
            return self._read_beams(key, running, outputs)
        ids: list[int] = []
        log_probs: list[float] = []
        for read in outputs:
            for output in read.values():
                ids += output.generated_ids
                if request.log_probs:
                    log_probs += output.generated_log_probs
        status = handle.get_status()
        ended = status != self._unfinished
        if not ids and not ended:
            return None
        kept, stopped = split_end(ids, request.end_ids)
        sequences = [SequenceTokens(0, kept, log_probs[: len(kept)])] if kept else []
        if not ended:
            return Event(key, sequences)
        if status == self._ignored:
            return Event(key, sequences, REASON_ERROR, self._too_large(request))
        return Event(key, sequences, REASON_STOP if stopped else REASON_LENGTH)

    def _read_beams(self, key: Hashable, running: _Running, outputs: list[Any]) -> Event | None:
        handle, request = running.handle, running.request
        status = handle.get_status()
        if status == self._unfinished:
            return None
        if status == self._ignored:
            return Event(key, reason=REASON_ERROR, message=self._too_large(request))
        # Beams are handed over once, at the end, in no useful order: best score first.
        final = sorted((o for read in outputs for o in read.values()), key=lambda o: -o.score)
        sequences, all_stopped = [], True
        for index, output in enumerate(final[: request.num_return_sequences]):
            kept, stopped = split_end(list(output.generated_ids), request.end_ids)
            all_stopped = all_stopped and stopped
            log_probs = list(output.generated_log_probs)[: len(kept)] if request.log_probs else []
            sequences.append(SequenceTokens(index, kept, log_probs))
        return Event(key, sequences, REASON_STOP if all_stopped else REASON_LENGTH)

    def _too_large(self, request: EngineRequest) -> str:
        return (
            f"the KV cache of {self._blocks} blocks has no room for a prompt of {len(request.input_ids)} tokens "
            f"and {request.max_tokens} new ones; raise runtime.kv_cache_gib"
        )

    def close(self) -> None:
        for running in self._running.values():
            running.handle.cancel()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        self._running.clear()
        self._waiting.clear()
