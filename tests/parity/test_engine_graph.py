"""The graph, run statefully, against transformers' logits in float32: ranks, biases, rope kinds, windows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

# Over 20 s because the reference environment imports torch once per session; the tests take about a second each.
pytestmark = pytest.mark.slow

RANKS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2)]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
# Of each split one family; all of them only in make test-all.
EVERY_DAY = [("llama", *ranks) for ranks in RANKS] + [(name, 2, 1) for name in FAMILIES[1:]]
SPLITS = [
    pytest.param(name, *ranks, marks=() if (name, *ranks) in EVERY_DAY else pytest.mark.full)
    for name in FAMILIES
    for ranks in RANKS
]
VARIANTS = ["llama_biases_rope_llama3", "llama_tied_rope_yarn", "qwen2_mixed_layers"]


@pytest.mark.parametrize(("name", "tensor", "pipeline"), SPLITS)
def test_logits_equal_transformers_for_every_split(
    name: str, tensor: int, pipeline: int, tiny_models: Path, compile_folder, stateful_logits
) -> None:
    reference = np.load(tiny_models / name / "reference.npz")
    engine = compile_folder(tiny_models / name, tensor, pipeline, dtype="float32")
    logits = stateful_logits(engine, reference["ids"].tolist())
    assert logits.shape == reference["logits"].shape == (80, 509)
    assert np.abs(logits - reference["logits"]).max() < 1e-4


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_of_biases_rope_kinds_and_mixed_windows(
    name: str, tensor: int, pipeline: int, tiny_models: Path, compile_folder, stateful_logits
) -> None:
    reference = np.load(tiny_models / name / "reference.npz")
    engine = compile_folder(tiny_models / name, tensor, pipeline, dtype="float32")
    logits = stateful_logits(engine, reference["ids"].tolist())
    assert np.abs(logits - reference["logits"]).max() < 1e-4


def test_the_window_matters_in_these_models(tiny_models: Path, compile_folder, stateful_logits, tmp_path: Path) -> None:
    """The same weights without the window differ by far more than the tolerance above: the comparison can fail."""
    folder = tmp_path / "mistral"
    folder.mkdir()
    for file in (tiny_models / "mistral").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": None}))
    reference = np.load(folder / "reference.npz")
    logits = stateful_logits(compile_folder(folder, dtype="float32"), reference["ids"].tolist())
    assert np.abs(logits - reference["logits"])[:8].max() < 1e-4
    assert np.abs(logits - reference["logits"])[8:].max() > 0.1


def test_equal_checkpoints_give_equal_bytes(tiny_models: Path, compile_folder, tmp_path: Path) -> None:
    """Also when other models were built in the process before, and from another copy of the folder."""
    first = compile_folder(tiny_models / "qwen2", 2, 1, dtype="float32")
    compile_folder(tiny_models / "qwen3", 2, 1, dtype="float32")
    copy = tmp_path / "qwen2"
    copy.mkdir()
    for file in (tiny_models / "qwen2").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    second = compile_folder(copy, 2, 1, dtype="float32")
    for file in ("openvino_model.xml", "openvino_model.bin", "engine.json", "config.json", "generation_config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_a_tied_table_is_stored_once(tiny_models: Path, compile_folder) -> None:
    tied = compile_folder(tiny_models / "llama_tied_rope_yarn", dtype="float32")
    untied = compile_folder(tiny_models / "llama", dtype="float32")
    sizes = [(folder / "openvino_model.bin").stat().st_size for folder in (tied, untied)]
    assert sizes[1] - sizes[0] == pytest.approx(509 * 128 * 4, abs=64)
