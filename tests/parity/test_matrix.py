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
from lpxbuild.families import families
from lpxbuild.output import Output
from lpxbuild.quantization import FORMATS, check_shapes
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme

ROOT = Path(__file__).parents[2]
BOUND = 1e-4
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
# TensorRT-LLM's plugin for mixtures knows weight-only, FP8, int4 groups and NVFP4.
EXPERTS, NOT_FOR_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe"), ("int8_sq", "fp8_pc_pt")

Cell = tuple[str, str, int, int]


def misfit(family: str, format_: str, pipeline: int) -> bool:
    return (pipeline > 1 and family in NO_PIPELINE) or (family in EXPERTS and format_ in NOT_FOR_EXPERTS)


def pairs() -> list[Cell]:
    """Every format and every family with every split at least once, in as few cells as that takes: the formats go
    round the families in an order that a seed shuffles."""
    shuffled = random.Random(20261201)
    cells: list[Cell] = []
    for tensor, pipeline in SPLITS:
        formats = list(TENSORRT_LLM)
        names = [name for name in FAMILIES if pipeline == 1 or name not in NO_PIPELINE]
        shuffled.shuffle(names)
        left = list(names)
        while left or formats:
            family = left[0] if left else shuffled.choice(names)
            fitting = [name for name in formats or TENSORRT_LLM if not misfit(family, name, pipeline)]
            if not fitting:
                left.append(left.pop(0))
                formats = formats if any(not misfit(f, name, pipeline) for f in left for name in formats) else []
                continue
            format_ = shuffled.choice(fitting)
            cells.append((family, format_, tensor, pipeline))
            left = left[1:]
            formats = [name for name in formats if name != format_]
    return cells


FEW = pairs()
ALL = [
    (family, format_, tensor, pipeline)
    for family, format_, (tensor, pipeline) in product(FAMILIES, TENSORRT_LLM, SPLITS)
    if not misfit(family, format_, pipeline)
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
    for place, names in ((0, FAMILIES), (1, TENSORRT_LLM)):
        assert {cell[place] for cell in FEW} == set(names)
        # Pairs: each of them with one and two ranks, and with one and two stages where there are any.
        assert {(cell[place], cell[2]) for cell in FEW} == set(product(names, (1, 2)))
    assert {(cell[1], cell[3]) for cell in FEW} == set(product(TENSORRT_LLM, (1, 2)))
    assert {(cell[0], cell[3]) for cell in FEW} >= {(name, 2) for name in FAMILIES if name not in NO_PIPELINE}
    assert set(FEW) <= set(ALL)


def calibration_of(folder: Path) -> Calibration:
    """Factors of the inputs that the reference took; the largest inputs do not touch a weight."""
    tensors = {}
    with np.load(folder / "factors.npz") as factors:
        for module, values in factors.items():
            tensors[f"{module}.input_quantizer._pre_quant_scale"] = values
            tensors[f"{module}.input_quantizer._amax"] = np.array(4.0, np.float32)
    return Calibration(tensors)


def converted(folder: Path, place: Path, format_: str, tensor: int, pipeline: int) -> Path:
    """What the build does up to the checkpoint, its refusals included."""
    scheme = Scheme(format=format_)
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
    place = converted(models / family, tmp_path / "checkpoint", format_, tensor, pipeline)
    assert len(list(place.glob("rank*.safetensors"))) == tensor * pipeline
    with np.load(models / family / "logits.npz") as reference:
        found = logits(place, reference["ids"], tmp_path / "scratch")
        wanted = reference[f"{format_}-{tensor}" if format_.endswith("_wo") else format_]
        plain = reference["none"]
    bound = BOUND * np.abs(wanted).max()
    assert np.abs(found - wanted).max() < bound
    if format_ != "none":
        assert np.abs(found - plain).max() > 50 * bound
