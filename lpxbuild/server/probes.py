"""How the supervisor tells busy from dead: small requests of its own, and the traffic of everybody else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from lpxbuild.server.triton_http import TritonHttp, TritonHttpError


class Probe:
    """One small request to one model, in a thread of its own, so that waiting for it holds up nothing."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self.started = time.monotonic()
        self.error: TritonHttpError | None = None
        self._done = threading.Event()
        self._send = send
        threading.Thread(target=self._run, name="lpx-probe", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether an answer came, good or bad."""
        return self._done.is_set()

    def _run(self) -> None:
        try:
            self._send()
        except TritonHttpError as error:
            self.error = error
        finally:
            self._done.set()


def probe_request(client: TritonHttp, model: str, timeout: float) -> Callable[[], Any] | None:
    """The smallest request that a model of the official layout answers; None for models that are not probed."""
    if model == "preprocessing":
        inputs = [
            {"name": "QUERY", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]},
            {"name": "REQUEST_OUTPUT_LEN", "shape": [1, 1], "datatype": "INT32", "data": [1]},
        ]
        return lambda: client.infer(model, inputs, timeout)
    if model == "postprocessing":
        inputs = [
            {"name": "TOKENS_BATCH", "shape": [1, 1, 1], "datatype": "INT32", "data": [0]},
            {"name": "SEQUENCE_LENGTH", "shape": [1, 1], "datatype": "INT32", "data": [1]},
        ]
        return lambda: client.infer(model, inputs, timeout)
    if model == "tensorrt_llm":
        body = {"input_ids": [0, 0], "input_lengths": 2, "request_output_len": 1}
        return lambda: client.generate(model, body, timeout)
    return None


class Traffic:
    """Answers that others than the supervisor's own probes got from a model, from Triton's counters.

    Triton counts a decoupled request once, when it ends; in the ensemble each of its tokens is one request to
    postprocessing, so those count for tensorrt_llm too.
    """

    def __init__(self) -> None:
        self._answers: dict[str, int] = {}
        self._probes: dict[str, int] = {}
        self._most: dict[str, int] = {}

    def count_probe(self, model: str) -> None:
        """A probe is being sent: its answer is no traffic."""
        self._probes[model] = self._probes.get(model, 0) + 1

    def update(self, answers: Mapping[str, int]) -> set[str]:
        """Take the counters as they are now; models that got traffic since the last call."""
        for model, count in answers.items():
            if count < self._answers.get(model, 0):
                # Loaded again: its counters begin at zero.
                self._probes.pop(model, None)
                self._most.clear()
        self._answers = dict(answers)
        others = {model: count - self._probes.get(model, 0) for model, count in answers.items()}
        if "tensorrt_llm" in others and "postprocessing" in others:
            others["tensorrt_llm"] += others["postprocessing"]
        # Compared with the most so far: a probe that is still under way lowers the number for a moment.
        moved = {model for model, count in others.items() if count > self._most.get(model, -(1 << 62))}
        self._most |= {model: others[model] for model in moved}
        return moved
