"""Every format against its dequantized weights.

int8_wo, int4_wo and `fast`: float32 engines of the dequantized weights, dequantized here by the written rule.
TensorRT-LLM: scale = max|w| / 2^(bits-1) per output row of what one rank holds, q = round half away from zero,
clamped; the kernel multiplies with the scale rounded to the model's dtype (bfloat16 here).
The other formats: against an engine of the float32 rows that the checkpoint's reader computes from what is stored
(test_engine_linears.py has every form's arithmetic by the layout's description).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme

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


@pytest.mark.parametrize(
    ("name", "bits", "tensor"),
    [
        pytest.param(name, bits, tensor, marks=() if name == "llama" or tensor == 2 else pytest.mark.full)
        for name in ("llama", "qwen2")
        for bits in (8, 4)
        for tensor in (1, 2, 8)
    ],
)
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


def calibration_of(folder: Path) -> Calibration:
    """Any numbers: one amax for each input, and factors of the input that layers with the same input share."""
    random = np.random.default_rng(4)
    tensors: dict[str, Any] = {}
    with safe_open(folder / "model.safetensors", "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    shared: dict[str, Any] = {}
    for name, shape in sorted(shapes.items()):
        module = name.removesuffix(".weight")
        if len(shape) != 2 or "layers" not in module:
            continue
        inputs = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        shared.setdefault(inputs, random.uniform(0.5, 2.0, shape[1]).astype(np.float32))
        tensors[f"{module}.input_quantizer._amax"] = np.array(3.0, np.float32)
        tensors[f"{module}.input_quantizer._pre_quant_scale"] = shared[inputs]
    return Calibration(tensors)


class Dequantized:
    """A checkpoint of which the engine takes float32 rows."""

    def __init__(self, reader: Any) -> None:
        self.config, self.shape = reader.config, reader.shape
        self.tensor, self.names, self.weight_rows = reader.tensor, reader.names, reader.weight_rows

    def format_of(self, name: str) -> str:
        return "dequantized"


FORMATS = ["int4_rtn", "int4_awq", "w4a8_awq", "int8_sq", "fp8", "fp8_pc_pt", "nvfp4"]
MODELS = [("llama", name) for name in FORMATS] + [("mixtral", "fp8"), ("mixtral", "int4_awq"), ("phi3", "nvfp4")]
# Every day each format once, at two ranks, and one of them with experts; the rest only in make test-all.
EVERY_DAY = [*(("llama", name, 2) for name in FORMATS), ("mixtral", "int4_awq", 2)]


@pytest.mark.parametrize(
    ("model", "name", "tensor"),
    [
        pytest.param(*case, tensor, marks=() if (*case, tensor) in EVERY_DAY else pytest.mark.full)
        for case in MODELS
        for tensor in (1, 2)
    ],
)
def test_stored_formats_equal_their_dequantized_rows(
    model: str, name: str, tensor: int, tiny_models: Path, compile_folder, stateful_logits, tmp_path: Path
) -> None:
    import openvino as ov

    from lpxbuild import checkpoint
    from lpxbuild.engine.openvino.graph import DecoderGraph
    from lpxbuild.engine.openvino.weights import MergedWeights

    folder = tiny_models / model
    scheme = Scheme(name, group_size=64)
    arguments = {
        "dtype": "bfloat16",
        "quantization": scheme,
        "calibration": CALIBRATIONS.setdefault(model, calibration_of(folder)),
    }
    engine = compile_folder(folder, tensor, 1, **arguments)
    ids = np.load(folder / "reference.npz")["ids"]
    found = stateful_logits(engine, ids.tolist())
    graph = DecoderGraph(MergedWeights(Dequantized(checkpoint.read(engine.parent / "checkpoint")), tmp_path))
    request = ov.Core().compile_model(graph.model(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    places = np.arange(len(ids))[None]
    request.infer(
        {
            "input_ids": ids[None],
            "attention_mask": 0 * places + 1,
            "position_ids": places,
            "beam_idx": np.zeros(1, "i4"),
        }
    )
    assert np.abs(found - request.get_tensor("logits").data[0]).max() < 2e-5
    plain = stateful_logits(compile_folder(folder, dtype="bfloat16"), ids.tolist())
    assert np.abs(found - plain).max() > 1e-3, "it is quantized"
    described = json.loads((engine / "engine.json").read_text())
    assert list(described["weights"]) == [name]
    assert described["activations"] == described["kv_cache"] == "float32"


@pytest.mark.full  # the others of make test show that each split equals its own rows
@pytest.mark.parametrize(("model", "name"), MODELS)
def test_two_ranks_hold_the_weights_of_one(
    model: str, name: str, tiny_models: Path, compile_folder, stateful_logits
) -> None:
    """Scales are found before the split, so that the joined weights are the same."""
    folder = tiny_models / model
    calibration = CALIBRATIONS.setdefault(model, calibration_of(folder))
    ids = np.load(folder / "reference.npz")["ids"].tolist()
    one, two = (
        stateful_logits(
            compile_folder(
                folder, tensor, dtype="bfloat16", quantization=Scheme(name, group_size=64), calibration=calibration
            ),
            ids,
        )
        for tensor in (1, 2)
    )
    assert np.abs(one - two).max() < 2e-5


CALIBRATIONS: dict[str, Calibration] = {}
