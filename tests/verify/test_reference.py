"""The reference side: a script of its own, layer by layer as good as whole, and what it cannot run it says."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.errors import SourceError
from lpxbuild.verify import children
from lpxbuild.verify.sides import BOOTSTRAP, REFERENCE, Job, Transformers

# Over 20 s because the reference environment imports torch for each run.
pytestmark = pytest.mark.slow

# What differs in a model's body: tied, learned positions, two RoPE bases, experts, ALiBi and a fused projection.
NAMES = ["llama_tied_rope_yarn", "gpt2", "gemma3_text", "mixtral", "falcon_rw", "qwen2_mixed_layers"]


def side(folder: Path, python: Path, log: Path, *, layerwise: bool = False) -> Transformers:
    return Transformers(folder, python, 1, layerwise, log, "transformers")


def job_of(folder: Path) -> tuple[Job, Any]:
    reference = np.load(folder / "reference.npz")
    ids, prompt = reference["ids"].tolist(), reference["prompt"].tolist()
    return Job((ids, ids[:50]), ids[:40], (prompt,), (), 32), reference


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_layer_by_layer_equals_the_whole_model(
    name: str, tiny_models: Path, reference_python: Path, tmp_path: Path
) -> None:
    """Logits of both against the model's own forward (reference.npz), points of one against the other's."""
    job, reference = job_of(tiny_models / name)
    given = [reference["greedy"].tolist()]
    outcomes = [
        side(tiny_models / name, reference_python, tmp_path / "log", layerwise=layerwise).run(
            job, tmp_path / str(layerwise), given, texts=True, forced={}
        )
        for layerwise in (False, True)
    ]
    for outcome in outcomes:
        # The second text is padded to the first one's length, which a causal model does not see.
        assert np.abs(outcome.logits(0) - reference["logits"]).max() < 1e-5
        assert np.abs(outcome.logits(1) - reference["logits"][:50]).max() < 1e-5
        assert outcome.result["answers"] == [{"ids": given[0], "complete": True}]
    one, other = (outcome.point_files() for outcome in outcomes)
    assert one.keys() == other.keys()
    # Eight places in each of four layers even where q, k and v are one (Falcon), the embedding and the last norm.
    assert len(one) >= 4 * 8 + 2
    for point in one:
        assert np.abs(np.load(one[point]) - np.load(other[point])).max() < 1e-6, point


@pytest.mark.full
def test_answers_go_on_after_the_first_difference(tiny_models: Path, reference_python: Path, tmp_path: Path) -> None:
    """Whole: the rest is generated. Layer by layer: only the token that differs is known."""
    job, reference = job_of(tiny_models / "llama")
    wanted = reference["greedy"].tolist()
    wrong = [[*wanted[:5], (wanted[5] + 1) % 509, *wanted[6:]]]
    found = [
        side(tiny_models / "llama", reference_python, tmp_path / "log", layerwise=layerwise)
        .run(job, tmp_path / str(layerwise), wrong, texts=True, forced=None)
        .result["answers"]
        for layerwise in (False, True)
    ]
    assert found == [[{"ids": wanted, "complete": True}], [{"ids": wanted[:6], "complete": False}]]


def test_imports_nothing_of_lpxbuild() -> None:
    """What judges must not share code with what is judged."""
    for file in REFERENCE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            # Relative imports stay within the folder, which is a package of its own there.
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1
                names += [node.module or ""] if node.level == 0 else []
            assert not any(name.startswith("lpxbuild") for name in names)


@pytest.mark.full
def test_what_it_cannot_load_is_a_refusal(reference_python: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    job = Job(([3, 4],), [3, 4], (), (), 1)
    with pytest.raises((SourceError, children.ToolError)) as caught:
        side(tmp_path / "model", reference_python, tmp_path / "log").run(
            job, tmp_path / "out", [], texts=True, forced=None
        )
    assert str(tmp_path / "log") in str(caught.value)


def test_a_child_is_ended_with_its_parent(reference_python: Path, tmp_path: Path) -> None:
    """The job names the process that started it; under another one it does nothing."""
    (tmp_path / "job.json").write_text(json.dumps({"parent": os.getpid() + 1}))
    done = subprocess.run([reference_python, "-I", "-c", BOOTSTRAP, REFERENCE, tmp_path / "job.json"], timeout=60)
    assert done.returncode == 1


@pytest.mark.full
def test_memory_is_bounded_by_a_layer(smollm2: Path, reference_python: Path, tmp_path: Path) -> None:
    """SmolLM2 has 538 MB of float32 weights; a layer has 14 MB, the embedding 113 MB."""
    ids = list(range(100, 228))
    peaks = {}
    for layerwise in (False, True):
        place = tmp_path / str(layerwise)
        place.mkdir()
        job = {"parent": os.getpid(), "out": str(place), "folder": str(smollm2), "layerwise": layerwise, "threads": 1}
        job |= {"sequences": [ids], "answers": [], "end_ids": [], "length": 1, "probe": [], "forced": {}}
        (place / "job.json").write_text(json.dumps(job))
        child = subprocess.Popen([reference_python, "-I", "-c", BOOTSTRAP, REFERENCE, place / "job.json"])
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0
        peaks[layerwise] = usage.ru_maxrss / 1024
    # Mapped files count too, so the bound is not tight: at least half of the weights' memory is saved.
    assert peaks[True] < peaks[False] - 250
    both = [np.load(tmp_path / str(layerwise) / "logits0.npy") for layerwise in (False, True)]
    assert np.abs(both[0] - both[1]).max() < 1e-3


@pytest.mark.full
def test_points_have_names_of_every_family(
    tiny_models: Path, reference_python: Path, tmp_path: Path, speaking_models: Callable[[str], Path]
) -> None:
    """A fused projection is taken apart, a router is found, and one norm before both parts is one point."""
    job, _ = job_of(tiny_models / "phi3")
    found = side(tiny_models / "phi3", reference_python, tmp_path / "log").run(
        job, tmp_path / "out", [[]], texts=False, forced={}
    )
    points = found.result["points"]
    assert {f"layers.0.attention.{part}" for part in ("q", "k", "v", "context", "dense")} <= points.keys()
    assert points["layers.0.attention.k"] == {
        "file": points["layers.0.attention.k"]["file"],
        "module": "model.layers.0.self_attn.qkv_proj",
        "side": "out",
        "begin": 128,
        "end": 192,
        "linear": "model.layers.0.self_attn.qkv_proj",
        "vectors": False,
    }
    assert {
        "layers.3.mlp.gate",
        "layers.3.mlp.up",
        "layers.3.mlp.inner",
        "ln_f",
        "logits",
        "embedding",
    } <= points.keys()
