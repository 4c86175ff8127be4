"""Unified checkpoints bit for bit against NVIDIA ModelOpt's export, and each difference with its reason."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.checkpoint.unified import convert_unified, read_unified
from lpxbuild.families import families
from lpxbuild.output import Output

sys.path.insert(0, str(Path(__file__).parent))
import unified_reference as reference

CONV1D = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
ROOT = Path(__file__).resolve().parents[2]
ROW_SCALES = ("fp8_pc_pt", "int8_sq", "int4_awq", "int4_awq-g64")
EXPERT_HALF = re.compile(r"\.experts\.\d+\.(w1|w3|gate_proj|up_proj)\.(weight|weight_scale)$")
EMBEDDING = "model.embed_tokens"
Converted = Callable[[str, str], Path]


CASES = [
    (model, export)
    for model in reference.MODELS
    for export in reference.exports(model)
    if model != "falcon" or export in ("none", "fp16")
]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    sources: dict[str, Any] = {}
    made: dict[tuple[str, str], Path] = {}

    def convert(model: str, export: str) -> Path:
        if (model, export) not in made:
            place = tmp_path_factory.mktemp(model)
            if model not in sources:
                sources[model] = reference.checked(reference.write_source(model, place / "source"))
            convert_unified(
                sources[model],
                place / "checkpoint",
                dtype="float16" if export == "fp16" else "bfloat16",
                scheme=reference.SCHEMES[export],
                calibration=reference.calibration(model, export),
                workers=1,
                output=Output.quiet(),
            )
            made[model, export] = place / "checkpoint"
        return made[model, export]

    return convert


def config(folder: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    file = folder / "hf_quant_config.json"
    return json.loads((folder / "config.json").read_text()), json.loads(file.read_text()) if file.exists() else None


def widened(model: str, export: str, name: str) -> bool:
    """See TestDeliberateDifferences.test_experts_keep_scales_of_their_own."""
    return model in ("mixtral", "qwen3_moe") and export in ROW_SCALES and EXPERT_HALF.search(name) is not None


@pytest.mark.parametrize(("model", "export"), CASES)
def test_every_tensor_has_the_bits_of_modelopt(converted: Converted, model: str, export: str) -> None:
    ours = {}
    for name, tensor in reference.stored(converted(model, export)).items():
        # See TestDeliberateDifferences.test_gpt2: the orientation differs wherever ModelOpt's quantizers were attached.
        same = model != "gpt2" or export in ("none", "fp16") or not name.endswith(CONV1D)
        ours[name] = reference.digest(*(tensor if same else reference.turned(*tensor)))
    theirs = reference.expected(model, export)
    assert set(ours) == set(theirs)
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert all(widened(model, export, name) for name in differing)


@pytest.mark.parametrize(("model", "export"), CASES)
def test_loaders_are_told_what_modelopt_tells_them(converted: Converted, model: str, export: str) -> None:
    whole, quant = config(converted(model, export))
    recorded = reference.record(model)["exports"][export]
    pairs = ((quant, recorded["hf_quant_config"]), (whole.get("quantization_config"), recorded["quantization_config"]))
    for ours, theirs in pairs:
        assert (ours is None) == (theirs is None)
        if ours is None:
            continue
        assert ours.pop("producer")["name"] == "lpx"
        theirs = {key: value for key, value in copy.deepcopy(theirs).items() if key != "producer"}
        if model == "gemma3" and export != "kv":
            theirs.get("quantization", theirs)["exclude_modules" if ours is quant else "ignore"].append(EMBEDDING)
        assert ours == theirs


def test_every_family_is_compared() -> None:
    """A family without a record of ModelOpt's export would pass unseen; internlm2 has no class in transformers."""
    recorded = {reference.record(model)["config"]["model_type"] for model in reference.MODELS}
    assert set(families()) - recorded <= {"internlm2", "mistral"}


class TestDeliberateDifferences:
    """Where the export is wrong, with the reason."""

    @pytest.mark.parametrize("export", ["fp8", "kv", "nvfp4"])
    def test_gpt2_weights_keep_their_orientation(self, converted: Converted, export: str) -> None:
        """ModelOpt turns GPT-2's Conv1D into a linear and writes it (out, in), even where it stays unquantized.

        Loaders of GPT-2 turn every c_attn, c_proj and c_fc weight around when they read it, so it must be (in, out).
        """
        name = "transformer.h.0.mlp.c_fc.weight"
        theirs = reference.expected("gpt2", export)[name].split()[1]
        ours = "x".join(map(str, reference.stored(converted("gpt2", export))[name][1]))
        assert theirs.split("x") == ours.split("x")[::-1]
        plain = reference.expected("gpt2", "none")[name].split()[1]
        assert ours == {"fp8": plain, "kv": plain, "nvfp4": "64x512"}[export]

    @pytest.mark.parametrize("export", ROW_SCALES)
    @pytest.mark.parametrize(
        ("model", "expert", "halves"),
        [
            ("mixtral", "model.layers.0.block_sparse_moe.experts.{}.", ("w1", "w3")),
            ("qwen3_moe", "model.layers.0.mlp.experts.{}.", ("gate_proj", "up_proj")),
        ],
    )
    def test_experts_keep_scales_of_their_own(
        self, converted: Converted, model: str, expert: str, halves: tuple[str, str], export: str
    ) -> None:
        """Row by row, ModelOpt gives the two halves of an expert the larger scale of both.

        Kernels need one number for both halves where a format has one number (FP8, NVFP4: there the bits are the same);
        scales of rows and of groups are stacked, and the wider ones only make the steps coarser.
        """
        stored, theirs = reference.stored(converted(model, export)), reference.expected(model, export)
        for number in range(4):
            names = [f"{expert.format(number)}{half}.weight_scale" for half in halves]
            scales = [np.frombuffer(stored[name][2], np.float32) for name in names]
            assert not np.array_equal(*scales)
            wider = np.maximum(*scales)
            for name in names:
                assert reference.digest(*stored[name][:2], wider.tobytes()) == theirs[name]

    def test_falcon_is_quantized(self, converted: Converted) -> None:
        """ModelOpt says FP8 in the config and writes bfloat16 weights without scales: its class has another name."""
        name = "transformer.h.0.mlp.dense_h_to_4h"
        theirs = reference.expected("falcon", "fp8")
        assert theirs[f"{name}.weight"].startswith("BF16")
        assert f"{name}.weight_scale" not in theirs
        assert reference.record("falcon")["exports"]["fp8"]["hf_quant_config"]["quantization"]["quant_algo"] == "FP8"
        ours = reference.stored(converted("falcon", "fp8"))
        assert ours[f"{name}.weight"][:2] == ("F8_E4M3", [512, 128])
        assert {f"{name}.weight_scale", f"{name}.input_scale"} <= set(ours)

    def test_gemma3_excludes_its_embedding(self, converted: Converted) -> None:
        """ModelOpt lists nn.Embedding only, and Gemma 3's scaled embedding is a class of its own: lpx lists it, too."""
        quantization = reference.record("gemma3")["exports"]["fp8"]["hf_quant_config"]["quantization"]
        assert quantization["exclude_modules"] == ["lm_head"]
        _, ours = config(converted("gemma3", "fp8"))
        assert ours is not None
        assert ours["quantization"]["exclude_modules"] == ["lm_head", EMBEDDING]

    @pytest.mark.parametrize("export", ["fp8", "nvfp4", "int4_awq"])
    def test_a_layer_of_zeros_stays_one(self, tmp_path: Path, export: str) -> None:
        """ModelOpt's FP8 scale of zeros is 0 and the weights become NaN; other formats get the scale 1 there, too."""
        source = reference.checked(reference.write_source("qwen2", tmp_path / "source"))
        name = "model.layers.0.mlp.down_proj"
        entry = source.tensors[f"{name}.weight"]
        with entry.file.open("r+b") as file:
            file.seek(entry.begin)
            file.write(bytes(entry.nbytes))
        convert_unified(
            source,
            tmp_path / "out",
            dtype="auto",
            scheme=reference.SCHEMES[export],
            calibration=reference.calibration("qwen2", export),
            output=Output.quiet(),
        )
        reader = read_unified(tmp_path / "out")
        assert not reader.weight(f"{name}.weight").any()
        assert (reader.stored(f"{name}.weight_scale").astype(np.float32) == 1).all()

    def test_no_quantizer_is_left_in_the_config(self, converted: Converted) -> None:
        """config.json is the source's own: a newer transformers would write RoPE in words that older loaders ignore."""
        ours, _ = config(converted("llama", "fp8"))
        source = {**reference.record("llama")["config"], "dtype": "bfloat16"}
        if "torch_dtype" in source:
            source["torch_dtype"] = "bfloat16"
        assert {key: value for key, value in ours.items() if key != "quantization_config"} == source


@pytest.mark.full
def test_the_records_are_what_modelopt_writes(tmp_path: Path, reference_python: Path) -> None:
    """All records made again (two minutes): the same digests and configs come out."""
    script = ROOT / "tests" / "reference" / "unified_exports.py"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # ModelOpt leaves generated code there
    done = subprocess.run(
        [reference_python, script, tmp_path], capture_output=True, text=True, timeout=1800, env=environment
    )
    assert done.returncode == 0, done.stderr
    for model in reference.MODELS:
        assert json.loads((tmp_path / f"{model}.json").read_text())["exports"] == reference.record(model)["exports"]
