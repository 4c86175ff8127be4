"""Through Triton, exact precision, float32, format none: the greedy tokens of transformers, 32 of 32.

One server for all: the engine behind it is exchanged, and its host ended, so that the supervisor starts the next one.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from traces import wait_until

from lpxbuild.server import ServerSettings, SupervisorSettings, start
from lpxbuild.smoke.client import TritonClient

ROOT = Path(__file__).parents[2]
# mistral has a window of 8 tokens and the prompts have 24: three windows.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2))
TOKENS = 32


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder per family, with the tokens and log-probabilities of transformers in reference.npz."""
    python = ROOT / ".venv-ref" / "bin" / "python"
    if not python.exists():
        pytest.skip("no .venv-ref: run `make test` once")
    folder = tmp_path_factory.mktemp("references")
    script = ROOT / "tests" / "reference" / "tiny_models.py"
    done = subprocess.run([python, script, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for family in FAMILIES:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model.CASES / "baseline" / name, folder / family / name)
    return folder


class Served:
    """A served repository whose engine can be exchanged."""

    def __init__(self, server, repository: Path) -> None:
        self.server = server
        self.engine = repository / "tensorrt_llm" / "1" / "engine"
        self.client = TritonClient(server.http_url, server.grpc_url, idle=30)

    def exchange(self, engine: Path) -> None:
        if self.engine.is_symlink():
            self.engine.unlink()
        else:
            shutil.rmtree(self.engine)
        self.engine.symlink_to(engine)
        before = len(self.server.repairs)
        self.server.engine_host.kill()
        wait_until(lambda: len(self.server.repairs) > before, 30, "the next engine host")

    def greedy(self, ids: list[int]) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities; end ids switched off, as in the reference."""
        fields = {
            "input_ids": ids,
            "input_lengths": len(ids),
            "request_output_len": TOKENS,
            "end_id": -1,
            "exclude_input_in_output": True,
            "return_log_probs": True,
        }
        (response,) = self.client.responses("tensorrt_llm", [fields])
        length = int(response.outputs["sequence_length"].reshape(-1)[0])
        tokens = response.outputs["output_ids"].reshape(-1)[:length]
        return tokens.tolist(), response.outputs["output_log_probs"].reshape(-1)[:length].tolist()


@pytest.fixture(scope="module")
def served(references: Path, tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("parity")
    engine = tiny_model.build_engine(references / "llama", place / "first")
    repository = tiny_model.build_repository(engine, place / "repository")
    settings = ServerSettings(supervisor=SupervisorSettings(poll=0.05, most_repairs=1000))
    with start(repository, log_path=place / "triton.log", settings=settings) as server:
        yield Served(server, repository)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(served, references, tmp_path, family, tensor, pipeline):
    served.exchange(tiny_model.build_engine(references / family, tmp_path, tensor=tensor, pipeline=pipeline))
    reference = np.load(references / family / "reference.npz")
    tokens, log_probs = served.greedy(reference["prompt"].tolist())
    assert tokens == reference["greedy"].tolist()
    assert np.abs(np.array(log_probs) - reference["log_probs"]).max() <= 1e-3
