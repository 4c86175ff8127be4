"""Families × formats × ranks × stages: converted, read back, and run by the embedded engine.

The reference is transformers with the weights that the format keeps (tests/reference/matrix_models.py), in float32.
What is run here dequantizes the rank files, so only the order of sums differs: the bound is BOUND of the largest logit,
and the same logits lie further than that from those of the plain weights.
"""

from __future__ import annotations

import random
import subprocess
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from lpxbuild import checkpoint, source
from lpxbuild.errors import LpxError, SourceError
from lpxbuild.families import ModelShape, check_parallel, families, family_for
from lpxbuild.output import Output
from lpxbuild.quantization import FORMATS, check_shapes
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme

# The first test waits for the reference: torch, and 16 models with the weights of ten formats.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BOUND = 1e-4
KEY_AMAX = 896.0
# KV cache → its scale, in turn over the cells: the keys are the larger half.
CACHE_SCALES = {
    "none": None,
    "fp8": np.float32(KEY_AMAX) / np.float32(448),
    "int8": np.float32(KEY_AMAX) / np.float32(127),
}
FAMILIES = (
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "granite",
    "internlm2",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "starcoder2",
)
TENSORRT_LLM = tuple(name for name, row in FORMATS.items() if "tensorrt" in row.backends)
SPLITS = tuple(product((1, 2), (1, 2)))
NO_PIPELINE = ("gemma", "gemma2", "gemma3_text", "phi3")  # of TensorRT-LLM's own converters and classes
# TensorRT-LLM's mixtures refuse FP8 rowwise and have no SmoothQuant; its loader takes W4A8 and NVFP4 only where there
# are no experts. FP8 rowwise quantizes the inputs inside RMSNorm, so LayerNorm has none.
EXPERTS, NOT_FOR_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe"), ("int8_sq", "fp8_pc_pt", "w4a8_awq", "nvfp4")
LAYER_NORM, NOT_FOR_LAYER_NORM = ("falcon", "gpt2", "starcoder2"), ("fp8_pc_pt",)

Cell = tuple[str, str, int, int]


def misfit(family: str, format_: str, pipeline: int) -> bool:
    return (
        (pipeline > 1 and family in NO_PIPELINE)
        or (family in EXPERTS and format_ in NOT_FOR_EXPERTS)
        or (family in LAYER_NORM and format_ in NOT_FOR_LAYER_NORM)
    )


def pairs() -> list[Cell]:
    """Every family and every format with every split at least once; a seed says which of them meet."""
    shuffled = random.Random(20261201)
    cells: list[Cell] = []
    for tensor, pipeline in SPLITS:
        names = shuffled.sample(FAMILIES, len(FAMILIES))
        formats = shuffled.sample(TENSORRT_LLM, len(TENSORRT_LLM))
        for name in names:
            fitting = [format_ for format_ in formats if not misfit(name, format_, pipeline)]
            if fitting:
                formats.remove(fitting[0])
                formats.append(fitting[0])
                cells.append((name, fitting[0], tensor, pipeline))
    return cells


FEW = pairs()
ALL = [
    (family, format_, tensor, pipeline)
    for family, format_, (tensor, pipeline) in product(FAMILIES, TENSORRT_LLM, SPLITS)
    if not misfit(family, format_, pipeline)
]
MISFITS = [
    *product(NO_PIPELINE, ("none",), (2,)),
    *product(EXPERTS, NOT_FOR_EXPERTS, (1,)),
    *product(LAYER_NORM, NOT_FOR_LAYER_NORM, (1,)),
]
CELLS = [
    pytest.param(*cell, id="-".join(map(str, cell)), marks=[] if cell in FEW else pytest.mark.full) for cell in ALL
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    script = ROOT / "tests" / "reference" / "matrix_models.py"
    done = subprocess.run([reference_python, script, folder], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_family_and_format_is_here() -> None:
    assert set(FAMILIES) == set(families())
    assert {(cell[1], *cell[2:]) for cell in FEW} == {(name, *split) for name in TENSORRT_LLM for split in SPLITS}
    assert {(cell[0], *cell[2:]) for cell in FEW} == {
        (name, *split) for name in FAMILIES for split in SPLITS if split[1] == 1 or name not in NO_PIPELINE
    }
    assert set(FEW) <= set(ALL)


def calibration_of(folder: Path) -> Calibration:
    """Factors of the inputs that the reference took; the largest inputs do not touch a weight."""
    tensors = {}
    with np.load(folder / "factors.npz") as factors:
        for module, values in factors.items():
            tensors[f"{module}.input_quantizer._pre_quant_scale"] = values
            tensors[f"{module}.input_quantizer._amax"] = np.array(4.0, np.float32)
            attention = module.rpartition(".")[0]
            tensors[f"{attention}.k_bmm_quantizer._amax"] = np.array(KEY_AMAX, np.float32)
            tensors[f"{attention}.v_bmm_quantizer._amax"] = np.array(KEY_AMAX / 2, np.float32)
    return Calibration(tensors)


def converted(folder: Path, place: Path, scheme: Scheme, tensor: int, pipeline: int) -> Path:
    """What the build does up to the checkpoint, its refusals included."""
    checked = source.check(
        folder,
        origin=folder.name,
        need_tokenizer=False,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        output=Output.quiet(),
    )
    check_shapes(checked.shape, scheme, tensor)
    place.mkdir()
    checkpoint.convert(
        checked,
        place,
        dtype="auto",
        scheme=scheme,
        calibration=calibration_of(folder) if scheme.needs_calibration else None,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        workers=1,
        output=Output.quiet(),
    )
    return place


def logits(folder: Path, ids: np.ndarray, scratch: Path) -> np.ndarray:
    """[tokens, vocabulary] of the embedded engine's graph."""
    import openvino as ov

    from lpxbuild.engine.openvino.graph import DecoderGraph
    from lpxbuild.engine.openvino.weights import MergedWeights

    scratch.mkdir()
    graph = DecoderGraph(MergedWeights(checkpoint.read(folder), scratch))
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    request = ov.Core().compile_model(graph.model(), "CPU", properties).create_infer_request()
    request.infer(
        {
            "input_ids": ids[None],
            "attention_mask": np.ones((1, len(ids)), np.int64),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    found: np.ndarray = request.get_tensor("logits").data[0].copy()
    return found


@pytest.mark.parametrize(("family", "format_", "tensor", "pipeline"), CELLS)
def test_logits(family: str, format_: str, tensor: int, pipeline: int, models: Path, tmp_path: Path) -> None:
    kv_cache = list(CACHE_SCALES)[ALL.index((family, format_, tensor, pipeline)) % 3]
    place = converted(models / family, tmp_path / "checkpoint", Scheme(format_, kv_cache), tensor, pipeline)
    assert len(list(place.glob("rank*.safetensors"))) == tensor * pipeline
    if kv_cache != "none":
        stored = checkpoint.read(place)
        for rank, layer in product(range(tensor * pipeline), range(2 // pipeline)):
            scale = stored.tensor(f"transformer.layers.{layer}.attention.kv_cache_scaling_factor", rank)
            np.testing.assert_array_equal(scale, [CACHE_SCALES[kv_cache]])
    with np.load(models / family / "logits.npz") as reference:
        found = logits(place, reference["ids"], tmp_path / "scratch")
        wanted = reference[f"{format_}-{tensor}" if format_.endswith("_wo") else format_]
        plain = reference["none"]
    bound = BOUND * np.abs(wanted).max()
    assert np.abs(found - wanted).max() < bound
    if format_ != "none":
        assert np.abs(found - plain).max() > 50 * bound


@pytest.mark.parametrize(("family", "format_", "pipeline"), MISFITS)
def test_cells_that_tensorrt_llm_cannot_run_are_refused(
    family: str, format_: str, pipeline: int, models: Path, tmp_path: Path
) -> None:
    """Before anything is written, with what would work."""
    with pytest.raises(LpxError) as refusal:
        converted(models / family, tmp_path / "checkpoint", Scheme(format_), 1, pipeline)
    assert family in str(refusal.value)
    assert refusal.value.next
    assert not (tmp_path / "checkpoint").exists()


SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 1024, "n_layer": 2, "n_head": 16, "vocab_size": 320, "n_positions": 64}
# Rule → family, sizes that break it, splits; what the refusal names, and the tensor-parallel sizes that it advises.
SPLIT_RULES: dict[str, tuple[str, dict[str, int], int, int, str, str]] = {
    "query heads": (
        "llama",
        {"num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 1536},
        8,
        1,
        "num_attention_heads 12",
        "1, 2, 4",
    ),
    "KV heads": (
        "llama",
        {"num_attention_heads": 24, "num_key_value_heads": 6, "hidden_size": 1536},
        4,
        1,
        "num_key_value_heads 6",
        "1, 2",
    ),
    "KV heads that may not be copied": ("phi3", {"num_key_value_heads": 2}, 4, 1, "num_key_value_heads 2", "1, 2"),
    "MLP": ("llama", {"intermediate_size": 2050}, 4, 1, "intermediate_size 2050", "1, 2"),
    "experts": (
        "qwen3_moe",
        {"num_experts": 8, "moe_intermediate_size": 770},
        4,
        1,
        "moe_intermediate_size 770",
        "1, 2",
    ),
    "shared expert": (
        "qwen2_moe",
        {"num_experts": 4, "moe_intermediate_size": 768, "shared_expert_intermediate_size": 1538},
        4,
        1,
        "shared_expert_intermediate_size 1538",
        "1, 2",
    ),
    "vocabulary without padding": ("gemma", {"vocab_size": 322, "head_dim": 64}, 4, 1, "vocab_size 322", "1, 2"),
    "learned positions": ("gpt2", {"n_positions": 66}, 4, 1, "n_positions 66", "1, 2"),
    "stages": ("llama", {}, 1, 3, "num_hidden_layers 2", "2"),
    "no stages": ("gemma2", {"head_dim": 64}, 1, 2, "gemma2", "1, 2, 4, 8, 16"),
}


def shape_of(family: str, changes: dict[str, int]) -> ModelShape:
    config = {"model_type": family, **(GPT2 if family == "gpt2" else SIZES), **changes}
    return family_for(config).model_shape(config)


@pytest.mark.parametrize("rule", SPLIT_RULES)
def test_a_misfit_of_each_rule_of_splits(rule: str) -> None:
    family, changes, tensor, pipeline, found, advice = SPLIT_RULES[rule]
    shape = shape_of(family, changes)
    with pytest.raises(SourceError) as refusal:
        check_parallel(shape, tensor, pipeline)
    assert found in str(refusal.value)
    assert refusal.value.next is not None
    assert refusal.value.next.endswith(f" {advice}")
    # The advice is right: the largest size of it fits.
    check_parallel(shape, int(advice.split(", ")[-1]) if pipeline == 1 else 1, 1)


MLP = {"intermediate_size": 2112}  # 33 × 64
ONE_RANK, GROUP_64, NONE = (
    "parallel.tensor to one of: 1,",
    "quantization.group_size to 64",
    "quantization.format to none",
)
# Rule → family, sizes that break it, scheme, ranks; what the refusal names, and what it advises.
KERNEL_RULES: dict[str, tuple[str, dict[str, int], Scheme, int, str, str]] = {
    "weight-only, 64 for each rank": ("llama", MLP, Scheme("int8_wo"), 2, "intermediate_size 2112", ONE_RANK),
    "weight-only, qkv": (
        "llama",
        {"num_key_value_heads": 1, "head_dim": 36},
        Scheme("int4_wo"),
        1,
        "(num_attention_heads + 2 × num_key_value_heads) × head_dim 648",
        NONE,
    ),
    "whole groups": ("llama", MLP, Scheme("int4_rtn"), 1, "intermediate_size 2112", GROUP_64),
    "whole groups on each rank": (
        "llama",
        MLP,
        Scheme("int4_awq", group_size=64),
        2,
        "intermediate_size 2112",
        ONE_RANK,
    ),
    "W4A8, groups of 128": ("llama", MLP, Scheme("w4a8_awq"), 1, "intermediate_size 2112", NONE),
    "W4A8, no groups of 64": ("llama", {}, Scheme("w4a8_awq", group_size=64), 1, "group_size 64", "group_size to 128"),
    "NVFP4, 16 for each rank": (
        "llama",
        {"intermediate_size": 2064},
        Scheme("nvfp4"),
        2,
        "intermediate_size 2064",
        ONE_RANK,
    ),
    "experts": (
        "qwen3_moe",
        {"num_experts": 8, "moe_intermediate_size": 800},
        Scheme("int8_wo"),
        1,
        "moe_intermediate_size 800",
        NONE,
    ),
}


@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_a_misfit_of_each_rule_of_kernels(rule: str) -> None:
    family, changes, scheme, tensor, found, advice = KERNEL_RULES[rule]
    shape = shape_of(family, changes)
    check_parallel(shape, tensor, 1)
    with pytest.raises(LpxError) as refusal:
        check_shapes(shape, scheme, tensor)
    assert found in str(refusal.value)
    assert refusal.value.next is not None
    assert advice in refusal.value.next
