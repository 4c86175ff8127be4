"""Run by lpx's interpreter in a process of its own: what the embedded engine computes, from its saved graph.

usage: python -m lpxbuild.verify.candidate JOB.json. The job's `task` is

answers   greedy answers to prompts, and whether the engine agrees with itself: one piece and several pieces of a text
logits    logits of whole texts, and every point of the graph computed from the reference's values before it

The graph is the engine's own file, run statefully (keys and values in its variables), in pieces of PIECE tokens.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lpxbuild.engine.openvino  # noqa: F401  before openvino itself, which would report its import

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

PIECE = 128
"""Tokens of a text that go through the graph at a time."""
POINT = "lpx/"
"""How the engine marks the tensors that are points (lpxbuild.engine.openvino.nodes.point)."""


class Graph:
    """An engine folder's graph."""

    def __init__(self, engine: Path) -> None:
        import openvino as ov

        self.path = engine / "openvino_model.xml"
        self.properties = json.loads((engine / "engine.json").read_text(encoding="utf-8"))["properties"]
        self._core = ov.Core()
        self._request: Any = None

    def start(self) -> None:
        """Forget what was fed."""
        if self._request is None:
            self._request = self._core.compile_model(self.path, "CPU", self.properties).create_infer_request()
        self._request.reset_state()
        self._past = 0

    def forget(self) -> None:
        """Give the compiled graph's memory back."""
        self._request = None

    def feed(self, ids: list[int]) -> Array:
        """Logits [tokens, vocabulary] of the next tokens."""
        self._request.infer(_inputs(ids, self._past))
        self._past += len(ids)
        logits: Array = self._request.get_tensor("logits").data[0].copy()
        return logits

    def pieces(self, ids: list[int], size: int = PIECE) -> Iterator[tuple[int, Array]]:
        """(first position, logits) of each piece of a text."""
        self.start()
        for begin in range(0, len(ids), size):
            yield begin, self.feed(ids[begin : begin + size])

    def greedy(self, prompt: list[int], length: int, ends: list[int]) -> list[int]:
        """The answer, with the token that ended it."""
        self.start()
        answer: list[int] = []
        feed = prompt
        while len(answer) < length and (not answer or answer[-1] not in ends):
            feed = [int(self.feed(feed)[-1].argmax())]
            answer += feed
        return answer

    def points(self, ids: list[int], values: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """(point, what the graph makes of the values before it) for each point whose reference value is given.

        Args:
            values: point → [tokens, features]; "logits" has no consumer and needs none.
        """
        import numpy as np
        from openvino import opset13 as op

        model = self._core.read_model(self.path)
        inputs = _inputs(ids, 0)
        parameters: list[Any] = []
        results: list[Any] = []
        names: list[str] = []
        for output, point in _points(model):
            if point not in values:
                continue
            consumers = list(output.get_target_inputs())
            name = f"forced/{len(names)}"
            parameter = op.parameter(output.get_partial_shape(), output.get_element_type(), name=name)
            parameter.output(0).set_names({name})
            for consumer in consumers:
                consumer.replace_source_output(parameter.output(0))
            result = op.result(output)
            result.output(0).add_names({f"found/{point}"})
            parameters.append(parameter)
            results.append(result)
            names.append(point)
            value = np.asarray(values[point], np.float32)
            three = output.get_partial_shape().rank.get_length() == 3
            inputs[name] = value[None] if three else value
        model.add_parameters(parameters)
        model.add_results(results)
        request = self._core.compile_model(model, "CPU", self.properties).create_infer_request()
        request.infer(inputs)
        for point in names:
            found = request.get_tensor(f"found/{point}").data
            yield point, found.reshape(-1, found.shape[-1])
        yield "logits", request.get_tensor("logits").data[0]


def _points(model: Any) -> list[tuple[Any, str]]:
    """Outputs that are points, in the graph's order."""
    found = []
    for node in model.get_ordered_ops():
        for output in node.outputs():
            found += [(output, name[len(POINT) :]) for name in sorted(output.get_names()) if name.startswith(POINT)]
    return found


def _inputs(ids: list[int], past: int) -> dict[str, Any]:
    import numpy as np

    return {
        "input_ids": np.array([ids], np.int64),
        "attention_mask": np.ones((1, past + len(ids)), np.int64),
        "position_ids": np.arange(past, past + len(ids), dtype=np.int64)[None],
        "beam_idx": np.zeros(1, np.int32),
    }


def answers(graph: Graph, job: Mapping[str, Any]) -> dict[str, Any]:
    """Greedy answers; the largest difference of one text's log-probabilities between one piece and small ones."""
    import numpy as np

    found = [graph.greedy(prompt, job["length"], job["end_ids"]) for prompt in job["prompts"]]
    ids = job["probe"]
    whole = np.concatenate([block for _, block in graph.pieces(ids)])
    parts = np.concatenate([block for _, block in graph.pieces(ids, 7)])
    finite = bool(np.isfinite(whole).all() and np.isfinite(parts).all())
    difference = float(np.abs(whole - parts).max()) if finite else None
    spread = float(whole.std()) if finite else None
    return {"answers": found, "finite": finite, "pieces_difference": difference, "spread": spread}


def logits(graph: Graph, job: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    out = Path(job["out"])
    open_memmap: Any = np.lib.format.open_memmap
    for number, ids in enumerate(job["sequences"]):
        file = None
        for begin, block in graph.pieces(ids):
            if file is None:
                file = open_memmap(
                    out / f"logits{number}.npy", mode="w+", dtype=np.float32, shape=(len(ids), block.shape[1])
                )
            file[begin : begin + len(block)] = block
            file.flush()
    values = {point: np.load(path, mmap_mode="r") for point, path in job["forced"].items()}
    graph.forget()
    described = {}
    for number, (point, found) in enumerate(graph.points(job["probe"], values)):
        np.save(out / f"point{number}.npy", found)
        described[point] = f"point{number}.npy"
    return {"points": described}


def main(path: str) -> int:
    job = json.loads(Path(path).read_bytes())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive lpx, however that ends
    if os.getppid() != job["parent"]:
        return 1
    graph = Graph(Path(job["engine"]))
    result = (answers if job["task"] == "answers" else logits)(graph, job)
    (Path(job["out"]) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
