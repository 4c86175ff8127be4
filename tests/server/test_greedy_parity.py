"""Through Triton, exact precision, float32, format none: the greedy tokens of transformers, 32 of 32.

One server for all: the engine behind it is exchanged, and its host ended, so that the supervisor starts the next one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from traces import wait_until

from lpxbuild.server import ServerSettings, SupervisorSettings, start
from lpxbuild.smoke.client import TritonClient

# mistral has a window of 8 tokens and the prompts have 24: three windows.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2))
TOKENS = 32


@pytest.fixture(scope="module")
def references(tiny_models: Path) -> Path:
    """The tiny models with a tokenizer, which a repository needs."""
    for family in FAMILIES:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model.CASES / "baseline" / name, tiny_models / family / name)
    return tiny_models


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


def test_ignoring_the_window_would_be_seen(served, references, tmp_path):
    """The same weights without their window answer otherwise, so the comparison above can fail."""
    folder = tmp_path / "windowless"
    shutil.copytree(references / "mistral", folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["sliding_window"] == 8
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    served.exchange(tiny_model.build_engine(folder, tmp_path / "built"))
    reference = np.load(references / "mistral" / "reference.npz")
    assert len(reference["prompt"]) == 3 * 8
    tokens, _ = served.greedy(reference["prompt"].tolist())
    assert tokens != reference["greedy"].tolist()


# (3, 2) also in make test: a real model at the widest split. The others only in make test-all: 540 MB each.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [*(pytest.param(*split, marks=pytest.mark.full) for split in ((1, 1), (3, 1), (1, 2))), (3, 2)],
)
def test_smollm2_equals_transformers(smollm2, tmp_path, tensor, pipeline):
    runtime = tiny_model.Runtime(threads=2, kv_cache_bytes=256 << 20)
    engine = tiny_model.build_engine(smollm2, tmp_path / "built", tensor=tensor, pipeline=pipeline, runtime=runtime)
    repository = tiny_model.build_repository(engine, tmp_path / "repository")
    reference = np.load(smollm2.parent / "reference.npz")
    prompt = json.loads((smollm2.parent / "prompt.json").read_text())
    with start(repository, log_path=tmp_path / "triton.log") as server:
        tokens, log_probs = Served(server, repository).greedy(prompt)
    assert tokens == reference["greedy"].tolist()
    assert np.abs(np.array(log_probs) - reference["log_probs"]).max() <= 1e-3
    # Half a gigabyte each: do not leave them to the end of the session.
    shutil.rmtree(tmp_path)
