"""int8_wo, int4_wo and `fast` against float32 engines of the dequantized weights, dequantized here by the written rule.

TensorRT-LLM: scale = max|w| / 2^(bits-1) per output row of what one rank holds, q = round half away from zero,
clamped; the kernel multiplies with the scale rounded to the model's dtype (bfloat16 here).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

# Over 20 s because the reference environment imports torch once per session; the tests take about a second each.
pytestmark = pytest.mark.slow

ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def as_bfloat16(values: Any) -> Any:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def weight_only(weight: Any, bits: int) -> Any:
    limit = 2 ** (bits - 1)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(limit)
    ratio = weight / scale
    rounded = np.sign(ratio) * np.floor(np.abs(ratio) + np.float32(0.5))
    return np.clip(rounded, -limit, limit - 1).astype(np.float32) * as_bfloat16(scale)


def int8_per_channel(weight: Any) -> Any:
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(weight / scale).astype(np.float32) * scale


def dequantized_folder(source: Path, target: Path, rule: Any) -> Path:
    """A copy of the model whose tensors are `rule(name, values)`."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file({name: rule(name, values) for name, values in tensors.items()}, target / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    return target


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_weight_only_equals_float32_of_the_dequantized_weights(
    name: str, bits: int, tensor: int, tiny_models: Path, compile_folder, stateful_logits, paged, tmp_path: Path
) -> None:
    def rule(tensor_name: str, values: Any) -> Any:
        values = as_bfloat16(values)
        if "_proj.weight" not in tensor_name:
            return values
        pieces = np.split(values, tensor, axis=1) if tensor_name.endswith(ROW_PARALLEL) else [values]
        return np.concatenate([weight_only(piece, bits) for piece in pieces], axis=1)

    quantized = compile_folder(tiny_models / name, tensor, 1, dtype="bfloat16", quantization=f"int{bits}_wo")
    plain = compile_folder(dequantized_folder(tiny_models / name, tmp_path / "model", rule), dtype="float32")
    reference = np.load(tiny_models / name / "reference.npz")
    difference = stateful_logits(quantized, reference["ids"].tolist()) - stateful_logits(
        plain, reference["ids"].tolist()
    )
    assert np.abs(difference).max() < 1e-5
    prompt = [reference["prompt"].tolist()]
    assert paged(quantized).greedy(prompt, 16)[0].ids == paged(plain).greedy(prompt, 16)[0].ids


def test_ranks_have_scales_of_their_own(tiny_models: Path, compile_folder, stateful_logits) -> None:
    """Eight row-parallel shards are not one matrix: their rounding differs, so the logits must."""
    ids = np.load(tiny_models / "llama" / "reference.npz")["ids"].tolist()
    engines = [
        compile_folder(tiny_models / "llama", tensor, 1, dtype="bfloat16", quantization="int4_wo") for tensor in (1, 8)
    ]
    logits = [stateful_logits(engine, ids) for engine in engines]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_weights_are_stored_in_their_bits(tiny_models: Path, compile_folder) -> None:
    """Linear weights of 4 layers (qkv, dense, fc, gate, proj); embedding and head stay bfloat16."""
    elements = 4 * (256 * 128 + 128 * 128 + 3 * 256 * 128)
    sizes = {
        form: (
            (compile_folder(tiny_models / "llama", dtype="bfloat16", quantization=form) / "openvino_model.bin")
            .stat()
            .st_size
        )
        for form in ("none", "int8_wo", "int4_wo")
    }
    scales = 4 * 4 * (256 + 128 + 256 + 256 + 128)
    assert sizes["none"] - sizes["int8_wo"] == pytest.approx(elements - scales, rel=0.01)
    assert sizes["int8_wo"] - sizes["int4_wo"] == pytest.approx(elements / 2, rel=0.01)


def test_fast_is_int8_per_channel(tiny_models: Path, compile_folder, stateful_logits, paged, tmp_path: Path) -> None:
    def rule(tensor_name: str, values: Any) -> Any:
        return int8_per_channel(values) if values.ndim > 1 else values

    fast = compile_folder(tiny_models / "llama", 2, 1, dtype="float32", precision="fast")
    plain = compile_folder(dequantized_folder(tiny_models / "llama", tmp_path / "model", rule), dtype="float32")
    reference = np.load(tiny_models / "llama" / "reference.npz")
    ids = reference["ids"].tolist()
    (answer,) = paged(fast).greedy([ids], 1)
    expected = stateful_logits(plain, ids)[-1].astype(np.float64)
    log_probs = expected - expected.max() - np.log(np.exp(expected - expected.max()).sum())
    # Activations are quantized too where the CPU has the instructions for it.
    assert answer.log_probs[0] == pytest.approx(log_probs[answer.ids[0]], abs=0.1)
    # The stored weights are the rule's, bit for bit: without dynamic quantization nothing else is left.
    engine = json.loads((fast / "engine.json").read_text())
    engine["properties"].update({"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32"})
    copy = tmp_path / "engine"
    copy.mkdir()
    for file in ("openvino_model.xml", "openvino_model.bin"):
        (copy / file).write_bytes((fast / file).read_bytes())
    (copy / "engine.json").write_text(json.dumps(engine))
    assert np.abs(stateful_logits(copy, ids) - stateful_logits(plain, ids)).max() < 1e-5
