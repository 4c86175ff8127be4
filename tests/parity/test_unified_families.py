"""Families that ModelOpt cannot export: their unified checkpoints by the formats' own bounds, and who shares what."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint.unified import convert_unified, read_unified
from lpxbuild.checkpoint.unified.modules import model_modules
from lpxbuild.errors import SourceError
from lpxbuild.families import family_for
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

sys.path.insert(0, str(Path(__file__).parent))
import unified_reference as reference
from named_weights import bfloat16_bits

INTERNLM2 = {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
UNCOMPARED = {
    "falcon": {**reference.record("falcon")["config"], "dtype": "bfloat16"},
    "internlm2": INTERNLM2,
    "qwen2_moe": {**reference.record("qwen2_moe")["config"], "dtype": "bfloat16"},
}


@pytest.fixture(params=sorted(UNCOMPARED))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    return reference.checked(folder_of(request.param, tmp_path / "source"))


def folder_of(name: str, folder: Path) -> Path:
    """A Hugging Face folder with weights by their names."""
    config: dict[str, Any] = UNCOMPARED[name]
    family = family_for(config)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    data: list[bytes] = []
    position = 0
    for name, spec in family.tensors(family.model_shape(config)).items():
        if not spec.required:
            continue
        data.append(bfloat16_bits(name, spec.shape).tobytes())
        end = position + len(data[-1])
        header[name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return folder


def original(source: Source, name: str) -> Any:
    bits = bfloat16_bits(name, source.tensors[name].shape)
    return bits.view(ml_dtypes.bfloat16).astype(np.float32)


def calibration_of(source: Source) -> Calibration:
    """Made-up numbers for every linear: factors that differ from module to module."""
    generator = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for module in model_modules(source.shape).linears:
        found[f"{module.name}.input_quantizer._amax"] = np.float32(generator.uniform(1, 4))[None]
        factors = generator.uniform(0.5, 2, module.shape[1]).astype(np.float32)
        found[f"{module.name}.input_quantizer._pre_quant_scale"] = factors
    return Calibration(found)


@pytest.mark.parametrize("name", ["fp8", "fp8_pc_pt", "int4_awq", "w4a8_awq", "nvfp4", "w4a16_nvfp4", "int8_sq"])
def test_every_weight_is_near_and_every_other_tensor_the_same(source: Source, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    scheme = Scheme(name, group_size=128)
    convert_unified(source, out, dtype="auto", scheme=scheme, calibration=calibration_of(source), output=Output.quiet())
    reader = read_unified(out)
    modules = model_modules(source.shape)
    linears = {module.piece.source: module for module in modules.linears}
    assert set(reader.weights) == set(source.tensors)
    folded = {name for group in modules.groups if group.norm for name in group.norm.tensors}
    for tensor in source.tensors:
        ours, theirs = reader.weight(tensor), original(source, tensor)
        if tensor not in linears:
            if tensor not in folded:
                assert np.array_equal(ours, theirs), tensor
            continue
        assert reader.format_of(linears[tensor].name) == name
        if not ("awq" in name and any(linears[tensor] in group.modules and group.norm for group in modules.groups)):
            assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > (0.97 if "4" in name else 0.999), tensor


def test_everything_plain_is_excluded(source: Source, tmp_path: Path) -> None:
    convert_unified(source, tmp_path / "out", dtype="auto", scheme=Scheme("w4a16_nvfp4"), output=Output.quiet())
    excluded = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert (
        excluded
        == {
            "falcon": ["lm_head", "transformer.word_embeddings"],
            "internlm2": ["model.tok_embeddings", "output"],
            "qwen2_moe": [
                "lm_head",
                "model.embed_tokens",
                "model.layers.0.mlp.gate",
                "model.layers.0.mlp.shared_expert_gate",
            ],
        }[source.shape.family]
    )


def test_norms_take_factors_over_only_where_nothing_else_reads_them(source: Source, tmp_path: Path) -> None:
    """Qwen2-MoE's first layer has a router and a shared expert behind its second norm, its second layer is dense."""
    convert_unified(
        source,
        tmp_path / "out",
        dtype="auto",
        scheme=Scheme("int4_awq", group_size=64),
        calibration=calibration_of(source),
        output=Output.quiet(),
    )
    reader = read_unified(tmp_path / "out")
    changed = {
        name
        for name in source.tensors
        if "norm" in name and not np.array_equal(reader.weight(name), original(source, name))
    }
    assert (
        changed
        == {
            "falcon": set(),
            "internlm2": {"model.layers.0.ffn_norm.weight"},
            "qwen2_moe": {
                "model.layers.0.input_layernorm.weight",
                "model.layers.1.input_layernorm.weight",
                "model.layers.1.post_attention_layernorm.weight",
            },
        }[source.shape.family]
    )
    stored = reference.stored(tmp_path / "out")
    if source.shape.family == "qwen2_moe":
        shared = "model.layers.0.mlp.shared_expert."
        halves = [stored[f"{shared}{half}_proj.pre_quant_scale"] for half in ("gate", "up")]
        assert halves[0] == halves[1]
        experts = [stored[f"model.layers.0.mlp.experts.{number}.up_proj.pre_quant_scale"] for number in range(4)]
        assert all(factors == experts[0] for factors in experts)


class TestCode:
    """transformers has no InternLM2: loaders run the Python files that lie beside the weights."""

    AUTO_MAP: ClassVar = {
        "AutoConfig": "configuration_x.Config",
        "AutoModelForCausalLM": "modeling_x.Model",
        "AutoModel": None,
    }

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return folder_of("internlm2", tmp_path / "source")

    def test_it_is_carried(self, folder: Path, tmp_path: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**INTERNLM2, "auto_map": self.AUTO_MAP}))
        for name in ("configuration_x.py", "modeling_x.py", "norms.py"):
            (folder / name).write_text(f"raise SystemExit({name!r})\n")
        convert_unified(in_unified(folder), tmp_path / "out", dtype="auto", output=Output.quiet())
        carried = {file.name: file.read_bytes() for file in (tmp_path / "out").glob("*.py")}
        assert carried == {file.name: file.read_bytes() for file in folder.glob("*.py")}
        assert len(carried) == 3

    def test_a_missing_file_is_refused_by_name(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({**INTERNLM2, "auto_map": self.AUTO_MAP}))
        (folder / "configuration_x.py").write_text("")
        with pytest.raises(SourceError, match=r"no modeling_x\.py"):
            in_unified(folder)

    def test_a_config_that_names_none_is_refused(self, folder: Path) -> None:
        with pytest.raises(SourceError, match="no auto_map"):
            in_unified(folder)

    def test_other_python_files_stay_where_they_are(self, folder: Path, tmp_path: Path) -> None:
        (folder / "setup.py").write_text("")
        convert_unified(reference.checked(folder), tmp_path / "out", dtype="auto", output=Output.quiet())
        assert not list((tmp_path / "out").glob("*.py"))


def in_unified(folder: Path) -> Source:
    return check(folder, origin="x", need_tokenizer=False, layout="unified_hf", output=Output.quiet())
