"""Engines of tiny models, compiled once per session, and the two ways of running them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild import checkpoint, source
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
import served_modules  # noqa: F401

from engine_executor import load_description, load_executor  # isort: skip
from engine_request import EngineLimits, parse  # isort: skip


@dataclass(frozen=True)
class Limits:
    max_batch_size: int = 8
    max_input_len: int = 96
    max_seq_len: int = 128
    max_num_tokens: int = 64
    max_beam_width: int = 4


@dataclass(frozen=True)
class Runtime:
    precision: str = "exact"
    threads: int | None = 2
    kv_cache_bytes: int = 32 << 20
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True


CompileFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_folder(tmp_path_factory: pytest.TempPathFactory) -> CompileFolder:
    """Hugging Face folder → engine folder, through check and convert; remembered by its arguments."""
    made: dict[Any, Path] = {}

    def compile_once(
        folder: Path,
        tensor: int = 1,
        pipeline: int = 1,
        *,
        dtype: str = "auto",
        quantization: str | Scheme = "none",
        calibration: Calibration | None = None,
        precision: str = "exact",
    ) -> Path:
        scheme = Scheme(quantization) if isinstance(quantization, str) else quantization
        key = (folder, tensor, pipeline, dtype, repr(scheme), calibration, precision)
        if key not in made:
            output = Output.quiet()
            place = tmp_path_factory.mktemp("engine")
            for name in ("checkpoint", "engine"):
                (place / name).mkdir()
            checked = source.check(
                folder,
                origin=str(folder),
                need_tokenizer=False,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                output=output,
            )
            checkpoint.convert(
                checked,
                place / "checkpoint",
                dtype=dtype,
                scheme=scheme,
                calibration=calibration,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                output=output,
            )
            compile_engine(
                "openvino",
                place / "checkpoint",
                place / "engine",
                limits=Limits(),
                runtime=Runtime(precision=precision),
                output=output,
            )
            made[key] = place / "engine"
        return made[key]

    return compile_once


@dataclass(frozen=True)
class Generated:
    ids: list[int]
    log_probs: list[float]


class PagedEngine:
    """An engine folder run by the executor that Triton's engine host loads."""

    def __init__(self, folder: Path) -> None:
        description = load_description(folder)
        self.limits = EngineLimits.from_description(description)
        self.executor = load_executor(folder, description)

    def run(self, requests: list[dict[str, Any]]) -> list[dict[int, Generated]]:
        """The requests (as "add" messages of the host) side by side; index of the sequence → its tokens."""
        for number, message in enumerate(requests):
            self.executor.add(number, parse(message, self.limits))
        answers: list[dict[int, Generated]] = [{} for _ in requests]
        while self.executor.busy:
            for event in self.executor.step():
                assert event.reason != "error", event.message
                for sequence in event.sequences:
                    answer = answers[event.key].setdefault(sequence.index, Generated([], []))
                    answer.ids.extend(sequence.ids)
                    answer.log_probs.extend(sequence.log_probs)
        return answers

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[Generated]:
        """All prompts as one batch; end ids are ignored."""
        settings = {"max_tokens": tokens, "end_ids": [], "log_probs": True}
        return [answer[0] for answer in self.run([{"input_ids": prompt, **settings} for prompt in prompts])]


@pytest.fixture(scope="session")
def paged() -> Callable[[Path], PagedEngine]:
    return PagedEngine


@pytest.fixture(scope="session")
def stateful_logits() -> Callable[[Path, list[int]], Any]:
    """Logits [tokens, vocabulary] of an engine folder's graph run statefully in one piece, with its own properties."""

    def run(folder: Path, ids: list[int]) -> Any:
        import openvino as ov

        properties = json.loads((folder / "engine.json").read_text())["properties"]
        request = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", properties).create_infer_request()
        request.infer(
            {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, len(ids)), np.int64),
                "position_ids": np.arange(len(ids), dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        return request.get_tensor("logits").data[0].copy()

    return run
