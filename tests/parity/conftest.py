"""Engines of tiny models, compiled once per session, and the two ways of running them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild import checkpoint, source
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output


@dataclass(frozen=True)
class Limits:
    max_batch_size: int = 8
    max_input_len: int = 96
    max_seq_len: int = 128
    max_num_tokens: int = 64
    max_beam_width: int = 1


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
        quantization: str = "none",
        precision: str = "exact",
    ) -> Path:
        key = (folder, tensor, pipeline, dtype, quantization, precision)
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
                quantization_format=quantization,
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
    """An engine folder in ContinuousBatchingPipeline, set up as engine.json says."""

    def __init__(self, folder: Path) -> None:
        import openvino_genai as genai

        engine = json.loads((folder / "engine.json").read_text())
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        for name, value in engine["scheduler"].items():
            if name != "cache_size_bytes":
                setattr(scheduler, name, value)
        self.pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", engine["properties"])

    def greedy(self, prompts: list[list[int]], tokens: int) -> list[Generated]:
        """All prompts as one batch; end ids are ignored."""
        import openvino as ov
        import openvino_genai as genai

        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        config.logprobs, config.apply_chat_template = 1, False
        handles = [
            self.pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        answers = [Generated([], []) for _ in prompts]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for handle, answer in zip(handles, answers):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.ids.extend(output.generated_ids)
                        answer.log_probs.extend(output.generated_log_probs)
        return answers


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
