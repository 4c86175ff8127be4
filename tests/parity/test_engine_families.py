"""Every family: logits, greedy tokens and log-probabilities of its engine against transformers in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.errors import SourceError
from lpxbuild.families import families

# Over 20 s because the reference environment imports torch once per session; the tests take about a second each.
pytestmark = pytest.mark.slow

# Names in tests/reference/tiny_models.py; a family without a model of its name there fails. llama, mistral, qwen2 and
# qwen3 are in test_engine_graph.py and test_engine_paged.py.
NAMES = [*sorted(set(families()) - {"llama", "mistral", "qwen2", "qwen3"}), "falcon_new", "falcon_rw"]
STATEFUL = {"gemma2", "falcon_rw"}  # what their attention needs; all others are paged
NO_PIPELINE = {"gemma", "gemma2", "gemma3_text", "phi3"}  # of TensorRT-LLM's own converters


@pytest.mark.parametrize("name", NAMES)
def test_equals_transformers(name: str, tiny_models: Path, compile_folder, stateful_logits, paged) -> None:
    """80 positions at once through the graph; then 24 of them, three windows, and 32 greedy tokens by the executor."""
    reference = np.load(tiny_models / name / "reference.npz")
    folder = compile_folder(tiny_models / name, dtype="float32")
    executor = "stateful" if name in STATEFUL else "paged"
    described = json.loads((folder / "engine.json").read_text())
    assert described["executor"] == executor
    if executor == "stateful":  # keys and values of 4 layers and 128 floats, for 128 tokens of 4 beams
        assert described["scheduler"] == {"cache_size_bytes": 2 * 4 * 128 * 4 * 128 * 4}
    assert np.abs(stateful_logits(folder, reference["ids"].tolist()) - reference["logits"]).max() < 2e-5
    engine = paged(folder)
    wanted = {"input_ids": reference["prompt"].tolist(), "max_tokens": 32, "end_ids": []}
    # The stateful executor's library hands out no log-probabilities.
    wanted["log_probs"] = executor == "paged"
    ((answer,),) = ([sequences[0]] for sequences in engine.run([wanted]))
    assert answer.ids == reference["greedy"].tolist()
    if wanted["log_probs"]:
        assert np.abs(np.array(answer.log_probs) - reference["log_probs"]).max() < 1e-4
    engine.executor.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full), (2, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_every_split_makes_the_same_engine(
    name: str, tensor: int, pipeline: int, tiny_models: Path, compile_folder
) -> None:
    """To the byte: what is joined from two rank files is what one rank file holds, so the logits are those above."""
    if pipeline > 1 and name in NO_PIPELINE:
        pytest.skip("TensorRT-LLM has no pipeline parallelism for this family")
    whole = compile_folder(tiny_models / name, dtype="float32")
    split = compile_folder(tiny_models / name, tensor, pipeline, dtype="float32")
    ranks = sorted(path.name for path in (split.parent / "checkpoint").glob("rank*.safetensors"))
    assert ranks == [f"rank{rank}.safetensors" for rank in range(tensor * pipeline)]
    for file in ("openvino_model.xml", "openvino_model.bin"):
        assert (whole / file).read_bytes() == (split / file).read_bytes(), file


CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-cap on scores": ("gemma2", {"attn_softcap": None}),
    "soft-cap on logits": ("gemma2", {"final_softcap": None}),
    "window": ("gemma2", {"sliding_window": None}),
    "scale of the scores": ("gemma2", {"attention_scale": None}),
    "scale of the embedding": ("gemma", {"embedding_multiplier": 1.0}),
    "second RoPE base": ("gemma3_text", {"rotary_local_base": None}),
    "partial rotation": ("phi3", {"rotary_pct": 1.0, "rotary_scaling": None}),
    "long RoPE": ("phi3", {"rotary_scaling": None}),
    "scale of what a block adds": ("granite", {"residual_multiplier": 1.0}),
    "divisor of the logits": ("granite", {"logits_divisor": 1.0}),
    "ALiBi": ("falcon_rw", {"position": "learned"}),
    "error function of gelu": ("falcon", {"hidden_act": "gelu_tanh"}),
    "one norm for two": ("falcon_new", {"num_ln_in_parallel_attn": 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_part_matters(change: str, tiny_models: Path, compile_folder, tmp_path: Path) -> None:
    """Without it, the same checkpoint gives other logits by far more than the tolerance above: the test can fail."""
    import openvino as ov

    from lpxbuild import checkpoint
    from lpxbuild.engine.openvino.graph import DecoderGraph
    from lpxbuild.engine.openvino.weights import MergedWeights

    name, fields = CHANGES[change]
    reference = np.load(tiny_models / name / "reference.npz")
    reader = checkpoint.read(compile_folder(tiny_models / name, dtype="float32").parent / "checkpoint")
    reader.shape = replace(reader.shape, **fields)
    weights = MergedWeights(reader, tmp_path)
    if reader.shape.position == "learned":  # without ALiBi there are no positions at all
        weights.positions = lambda: np.zeros((256, 128), np.float32)  # type: ignore[method-assign]
    graph = DecoderGraph(weights)
    request = ov.Core().compile_model(graph.model(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    ids = reference["ids"][None]
    ones, positions = np.ones_like(ids), np.arange(ids.shape[1])[None]
    request.infer(
        {"input_ids": ids, "attention_mask": ones, "position_ids": positions, "beam_idx": np.zeros(1, np.int32)}
    )
    assert np.abs(request.get_tensor("logits").data[0] - reference["logits"]).max() > 1e-3


def test_long_rope_beyond_its_length_is_refused(tiny_models: Path, compile_folder) -> None:
    """transformers computes a sequence anew where it outgrows the short factors (here at 16); max_seq_len is 128."""
    with pytest.raises(SourceError, match="long_rope") as caught:
        compile_folder(tiny_models / "phi3_long_rope", dtype="float32")
    assert "max_seq_len" in caught.value.next
