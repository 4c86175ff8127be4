"""Quantized linears in rank files: what they decode to, how ranks and stages share them, mixtures of formats."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.checkpoint import CheckpointReader, ConversionReport, convert, read
from lpxbuild.errors import LpxError, RecipeError, SourceError
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import TYPES, checked, config_for, hf_tensors, write_source  # isort: skip

FORMATS = ("fp8", "fp8_pc_pt", "int8_sq", "int4_rtn", "int4_awq", "w4a8_awq", "nvfp4", "w4a16_nvfp4")
HIDDEN, INTERMEDIATE = 128, 256
FC, GATE, PROJ, QKV, DENSE = "mlp.fc", "mlp.gate", "mlp.proj", "attention.qkv", "attention.dense"
MODULES = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    DENSE: ("self_attn.o_proj",),
    FC: ("mlp.gate_proj",),
    GATE: ("mlp.up_proj",),
    PROJ: ("mlp.down_proj",),
}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], types: str) -> Path:
    return write_source(folder, config, {name: values.astype(TYPES[types]) for name, values in tensors.items()})


def small(**changes: Any) -> dict[str, Any]:
    return config_for(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=2, **changes)


Made = tuple[CheckpointReader, dict[str, np.ndarray], ConversionReport, Path]
Make = Callable[..., Made]


def calibration(layers: int = 2) -> Calibration:
    """Factors between 1/2 and 2; q, k and v have their own, as AWQ finds them."""
    generator = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        for target, modules in MODULES.items():
            for number, module in enumerate(modules):
                name = f"model.layers.{layer}.{module}.input_quantizer"
                size = INTERMEDIATE if target == PROJ else HIDDEN
                tensors[f"{name}._pre_quant_scale"] = np.exp2(generator.uniform(-1, 1, size)).astype(np.float32)
                tensors[f"{name}._amax"] = np.array(2.0 + number, np.float32)
        for number, kind in enumerate("kv"):
            amax = np.array([900.0, 127.0][number] + layer, np.float32)
            tensors[f"model.layers.{layer}.self_attn.{kind}_bmm_quantizer._amax"] = amax
    return Calibration(tensors)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def run(scheme: Scheme, *, types: str = "BF16", tensor: int = 1, pipeline: int = 1, **changes: Any) -> Made:
        config = small(**changes)
        tensors = hf_tensors(config)
        name = f"{types}-{tensor}-{pipeline}-{len(list(tmp_path.iterdir()))}"
        source = checked(
            written(tmp_path / f"source-{name}", config, tensors, types),
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
        report = convert(
            source,
            tmp_path / name,
            dtype="bfloat16",
            scheme=scheme,
            calibration=calibration(config["num_hidden_layers"]),
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
        )
        return read(tmp_path / name), tensors, report, tmp_path / name

    return run


def steps(name: str, weight: np.ndarray, group: int) -> np.ndarray:
    """The largest error that rounding may make at each number of a weight, without factors."""
    magnitude = np.abs(weight)
    if name in ("fp8", "fp8_pc_pt"):
        scale = magnitude.max() / 448 if name == "fp8" else magnitude.max(axis=1, keepdims=True) / 448
        return magnitude * 2.0**-4 + scale * 2.0**-10
    if name == "int8_sq":
        return np.broadcast_to(magnitude.max(axis=1, keepdims=True) / 127 / 2, weight.shape)
    size = 16 if "nvfp4" in name else group
    largest = np.repeat(magnitude.reshape(len(weight), -1, size).max(axis=2), size, axis=1)
    # E2M1 has 4 and 6 as neighbours; the scale of its block is itself rounded to FP8.
    return largest / 6 * (1 + 2.0**-3) + 1e-6 if "nvfp4" in name else largest / 7 / 2


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_effective_rows_are_the_weights_within_the_rounding(make: Make, name: str, tensor: int) -> None:
    reader, tensors, _, _ = make(Scheme(name, group_size=64), tensor=tensor)
    for target, modules in MODULES.items():
        tensor_name = f"transformer.layers.1.{target}.weight"
        assert reader.format_of(tensor_name) == name
        plain = [tensors[f"model.layers.1.{module}.weight"] for module in modules]
        shards = []
        for rank in range(tensor):
            rows = plain[0].shape[0] if target in (DENSE, PROJ) else sum(len(part) for part in plain) // tensor
            shards.append(reader.weight_rows(tensor_name, rank, 0, rows))
            middle = reader.weight_rows(tensor_name, rank, 3, 17)
            np.testing.assert_array_equal(middle, shards[-1][3:17])
        if target in (DENSE, PROJ):
            found, wanted = np.concatenate(shards, axis=1), plain[0]
        else:
            found = np.concatenate(shards)
            wanted = np.concatenate([np.split(part, tensor)[rank] for rank in range(tensor) for part in plain])
        wanted = wanted.astype(np.float32)
        # bfloat16 sources, and smoothed weights rounded to bfloat16 up to twice; factors between 1/2 and 2 stretch
        # what a scale is found over by at most 4.
        slack = 4 if name in ("int8_sq", "int4_awq", "w4a8_awq") else 1
        largest = np.maximum(slack * steps(name, wanted, 64), 0) + np.abs(wanted) * 2.0**-6
        assert (np.abs(found - wanted) <= largest).all()


@pytest.mark.parametrize("name", FORMATS)
def test_workers_and_types_of_the_source_do_not_change_bits(make: Make, name: str, tmp_path: Path) -> None:
    """The same numbers as bfloat16 and as float32; the per-tensor table and the arithmetic are one rule."""
    config = small()
    tensors = {key: (value.view(np.uint32) & 0xFFFF0000).view(np.float32) for key, value in hf_tensors(config).items()}
    made = []
    for types, workers in (("BF16", 1), ("BF16", 4), ("F32", 2)):
        folder = tmp_path / f"{types}-{workers}"
        source = checked(written(tmp_path / f"in-{types}-{workers}", config, tensors, types), tensor_parallel=2)
        # Powers of two, so that smoothing is exact in both types.
        powers = {key: np.exp2(np.rint(np.log2(value))) for key, value in calibration()._tensors.items()}
        convert(
            source,
            folder,
            dtype="bfloat16",
            scheme=Scheme(name, group_size=64),
            calibration=Calibration(powers),
            tensor_parallel=2,
            workers=workers,
        )
        made.append([sha256((folder / f"rank{rank}.safetensors").read_bytes()).hexdigest() for rank in (0, 1)])
    assert made[0] == made[1]
    if name not in (
        "int8_sq",
        "int4_awq",
        "w4a8_awq",
    ):  # the mean of q's, k's and v's factors is rounded to the source's type
        assert made[0] == made[2]


def test_rows_and_groups_of_zeros_have_scale_one(tmp_path: Path) -> None:
    config = small()
    tensors = hf_tensors(config)
    tensors["model.layers.0.mlp.down_proj.weight"][:] = 0
    source = checked(written(tmp_path / "source", config, tensors, "BF16"))
    for name, suffixes in {
        "fp8": ("weights_scaling_factor",),
        "fp8_pc_pt": ("per_channel_scale",),
        "int8_sq": ("weights_scaling_factor",),
        "int4_rtn": ("weights_scaling_factor",),
        "nvfp4": ("weights_scaling_factor", "weights_scaling_factor_2"),
    }.items():
        convert(source, tmp_path / name, dtype="auto", scheme=Scheme(name), calibration=calibration())
        reader = read(tmp_path / name)
        for suffix in suffixes:
            assert (reader.tensor(f"transformer.layers.0.mlp.proj.{suffix}", 0).astype(np.float32) == 1).all()
        assert not reader.weight_rows("transformer.layers.0.mlp.proj.weight", 0, 0, HIDDEN).any()


def test_more_ranks_than_kv_heads(make: Make) -> None:
    """ModelOpt cannot copy KV heads with scales for each channel ("not supported"); the loader of a rank wants just
    its own rows, so they are copied like the weights."""
    reader, tensors, _, _ = make(Scheme("int8_sq"), tensor=8)
    head = HIDDEN // 8
    for rank in (0, 1):
        found = reader.weight_rows("transformer.layers.0.attention.qkv.weight", rank, head, 2 * head)
        np.testing.assert_allclose(found, tensors["model.layers.0.self_attn.k_proj.weight"][:head], atol=0.1)


class TestCache:
    def test_scales(self, make: Make) -> None:
        """FP8: 900 / 448 and 127 / 448, which becomes 1. INT8: 900 / 127 and 1. The larger is for both."""
        for kind, expected in (("fp8", (900 / 448, 1.0)), ("int8", (900 / 127, 1.0))):
            reader, _, report, folder = make(Scheme(kv_cache=kind))
            prefix = "transformer.layers.0.attention."
            found = [reader.tensor(f"{prefix}{letter}_cache_scaling_factor", 0)[0] for letter in ("k", "v", "kv")]
            np.testing.assert_array_equal(found, np.float32([expected[0], expected[1], expected[0]]))
            assert report.kv_amax["model.layers.0.self_attn"] == (900.0, 127.0)
            quantization = json.loads((folder / "config.json").read_text())["quantization"]
            assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == (None, kind.upper())


def refused(make: Make, scheme: Scheme, **options: Any) -> LpxError:
    with pytest.raises((RecipeError, SourceError)) as caught:
        make(scheme, **options)
    return caught.value


class TestMixtures:
    def test_layers_left_plain_are_added_to_the_defaults(self, make: Make) -> None:
        """TensorRT-LLM's list replaces its defaults, so they are written along."""
        reader, tensors, _, folder = make(Scheme("fp8", exclude=("*.1.*",)))
        quantization = json.loads((folder / "config.json").read_text())["quantization"]
        assert quantization["quant_algo"] == "FP8"
        assert quantization["exclude_modules"] == [
            "*lm_head",
            "*router",
            "*vocab_embedding",
            "*position_embedding",
            "*block_embedding",
            "*shared_expert_gate*",
            "*fused_a",
            *(f"transformer.layers.1.{target}*" for target in MODULES),
        ]
        assert not (folder / "quant_cfg.json").exists()
        names = reader.names(0)
        assert "transformer.layers.0.mlp.fc.weights_scaling_factor" in names
        assert "transformer.layers.1.mlp.fc.weights_scaling_factor" not in names
        plain = reader.weight_rows("transformer.layers.1.mlp.proj.weight", 0, 0, HIDDEN)
        np.testing.assert_allclose(plain, tensors["model.layers.1.mlp.down_proj.weight"], rtol=2**-8)

    def test_several_formats_are_mixed_precision(self, make: Make) -> None:
        """quant_cfg.json as TensorRT-LLM's LayerQuantConfig reads it: module → the fields of its QuantConfig."""
        scheme = Scheme("fp8", "int8", 64, overrides={"*mlp.down_proj": "int4_awq", "*o_proj": "none"})
        reader, _, _, folder = make(scheme)
        assert json.loads((folder / "config.json").read_text())["quantization"] == {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "INT8",
            "exclude_modules": None,
        }
        layers = json.loads((folder / "quant_cfg.json").read_text())
        assert (layers["quant_algo"], layers["kv_cache_quant_algo"]) == ("MIXED_PRECISION", "INT8")
        assert layers["quantized_layers"]["transformer.layers.1.mlp.proj"] == {
            "quant_algo": "W4A16_AWQ",
            "group_size": 64,
            "has_zero_point": False,
            "pre_quant_scale": True,
        }
        assert layers["quantized_layers"]["transformer.layers.0.attention.qkv"] == {"quant_algo": "FP8"}
        assert set(layers["quantized_layers"]) == {
            f"transformer.layers.{layer}.{target}" for layer in (0, 1) for target in (QKV, FC, GATE, PROJ)
        }
        found = {target: reader.format_of(f"transformer.layers.0.{target}.weight") for target in MODULES}
        assert found == {QKV: "fp8", DENSE: "none", FC: "fp8", GATE: "fp8", PROJ: "int4_awq"}

    def test_parts_of_one_linear_have_one_format(self, make: Make) -> None:
        error = refused(make, Scheme("fp8", overrides={"*k_proj": "none"}))
        assert "attention.qkv is made of layers with different formats" in error.what
        assert "k_proj: none" in error.what

    def test_fc_and_gate_have_one_format(self, make: Make) -> None:
        error = refused(make, Scheme("fp8", exclude=("*up_proj",)))
        assert "mlp.gate is none" in error.what

    def test_stages_agree(self, make: Make) -> None:
        """Both layers are layer 0 of their stage, and config.json is one for both."""
        error = refused(make, Scheme("fp8", exclude=("*.1.*",)), pipeline=2)
        assert "fp8 in layer 0 and none in layer 1" in error.what
        assert "parallel.pipeline to 1" in error.next

    def test_row_wise_fp8_stays_alone(self, make: Make) -> None:
        assert "fp8_pc_pt" in refused(make, Scheme("fp8_pc_pt", exclude=("*o_proj",))).what

    def test_experts_have_the_format_of_the_model(self, tmp_path: Path) -> None:
        config = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "vocab_size": 64,
        }
        source = checked(written(tmp_path / "source", config, mixtral(config), "BF16"))
        with pytest.raises(
            RecipeError, match=r"the experts of transformer.layers.0.mlp are none, other layers are int4_rtn, int4_wo"
        ):
            convert(
                source,
                tmp_path / "out",
                dtype="auto",
                scheme=Scheme("int4_rtn", exclude=("*experts*",), overrides={"*o_proj": "int4_wo"}),
            )


def mixtral(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights of a one-layer Mixtral."""
    generator = np.random.default_rng(3)
    plain = {**config, "model_type": "llama"}
    tensors = {name: values for name, values in hf_tensors(plain).items() if ".mlp." not in name}
    prefix = "model.layers.0.block_sparse_moe."
    tensors[f"{prefix}gate.weight"] = generator.standard_normal((2, HIDDEN)).astype(np.float32)
    for expert in range(2):
        for name, shape in {
            "w1": (INTERMEDIATE, HIDDEN),
            "w2": (HIDDEN, INTERMEDIATE),
            "w3": (INTERMEDIATE, HIDDEN),
        }.items():
            scale = np.float32(1 + expert)
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = scale * generator.standard_normal(shape).astype(
                np.float32
            )
    return tensors


class TestExperts:
    @pytest.fixture
    def place(self, tmp_path: Path) -> tuple[Any, dict[str, np.ndarray]]:
        config = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "vocab_size": 64,
        }
        tensors = mixtral(config)
        return checked(written(tmp_path / "source", config, tensors, "F32"), tensor_parallel=2), tensors

    def numbers(self, *, second: bool = True) -> Calibration:
        """The second expert's input is larger; without it, no text reached that expert."""
        found: dict[str, Any] = {}
        names = [f"self_attn.{letter}_proj" for letter in "qkvo"]
        names += [f"block_sparse_moe.experts.{e}.w{w}" for e in range(2 if second else 1) for w in (1, 2, 3)]
        for name in names:
            prefix = f"model.layers.0.{name}.input_quantizer"
            size = INTERMEDIATE if name.endswith("w2") else HIDDEN
            found[f"{prefix}._amax"] = np.array(896.0 if ".1." in name else 448.0, np.float32)
            found[f"{prefix}._pre_quant_scale"] = np.full(size, 2.0 if ".1." in name else 1.0, np.float32)
        return Calibration(found)

    def test_fp8_has_a_scale_for_each_expert(self, place: Any, tmp_path: Path) -> None:
        """weights_scaling_factor (E, 1) = max(w1, w3) / 448 of each; one activation_scaling_factor (1) for all."""
        source, tensors = place
        convert(
            source,
            tmp_path / "out",
            dtype="bfloat16",
            scheme=Scheme("fp8"),
            calibration=self.numbers(),
            tensor_parallel=2,
        )
        reader = read(tmp_path / "out")
        prefix, experts = "transformer.layers.0.mlp.", "model.layers.0.block_sparse_moe.experts."
        for target, parts in (("fc", ("w1", "w3")), ("proj", ("w2",))):
            largest = [
                max(np.abs(tensors[f"{experts}{expert}.{part}.weight"]).max() for part in parts) for expert in range(2)
            ]
            expected = (np.float32(largest) / np.float32(448)).reshape(2, 1)
            for rank in (0, 1):
                scales = reader.tensor(f"{prefix}{target}.weights_scaling_factor", rank)
                np.testing.assert_array_equal(scales, expected)
                assert reader.tensor(f"{prefix}{target}.activation_scaling_factor", rank).tolist() == [2.0]
        # Rank 1 of 2: its half of w3 (up) above its half of w1 (gate), expert after expert.
        rows = reader.weight_rows(f"{prefix}fc.weight", 1, INTERMEDIATE, 2 * INTERMEDIATE)
        half = INTERMEDIATE // 2
        wanted = np.concatenate([tensors[f"{experts}1.{part}.weight"][half:] for part in ("w3", "w1")])
        assert (np.abs(rows - wanted) <= np.abs(wanted) * 2.0**-4 + expected_step(tensors)).all()

    @pytest.mark.parametrize("second", [True, False])
    def test_awq_experts_share_factors(self, place: Any, tmp_path: Path, second: bool) -> None:
        """TensorRT-LLM reads the first row of prequant_scaling_factor (E, in): all experts have the mean, 1.5."""
        source, _ = place
        convert(
            source,
            tmp_path / "out",
            dtype="bfloat16",
            scheme=Scheme("int4_awq", group_size=64),
            calibration=self.numbers(second=second),
            tensor_parallel=2,
        )
        reader = read(tmp_path / "out")
        factors = reader.tensor("transformer.layers.0.mlp.proj.prequant_scaling_factor", 1)
        assert factors.shape == (2, INTERMEDIATE // 2)
        assert set(factors.astype(np.float32).reshape(-1).tolist()) == {1.5 if second else 1.0}
        assert reader.tensor("transformer.layers.0.mlp.fc.weights_scaling_factor", 0).shape == (2, INTERMEDIATE, 2)

    def test_an_expert_without_text_takes_the_others_input(self, place: Any, tmp_path: Path) -> None:
        source, _ = place
        scheme = Scheme("fp8")
        convert(source, tmp_path / "out", dtype="bfloat16", scheme=scheme, calibration=self.numbers(second=False))
        scale = read(tmp_path / "out").tensor("transformer.layers.0.mlp.fc.activation_scaling_factor", 0)
        assert scale.tolist() == [1.0]

    def test_smooth_quant_has_no_experts(self, place: Any, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="mixture of experts"):
            convert(place[0], tmp_path / "out", dtype="auto", scheme=Scheme("int8_sq"), calibration=self.numbers())


def expected_step(tensors: dict[str, np.ndarray]) -> float:
    largest = max(np.abs(values).max() for name, values in tensors.items() if ".experts." in name)
    return float(largest / 448 * 2.0**-9)


class TestRefusals:
    def test_groups_that_a_rank_cannot_hold(self, make: Make) -> None:
        error = refused(make, Scheme("int4_rtn", group_size=128), tensor=2)
        assert "64 input features on each rank, int4_rtn needs a multiple of 128" in error.what

    def test_nothing_is_written_before(self, make: Make, tmp_path: Path) -> None:
        refused(make, Scheme("int4_rtn", group_size=128), tensor=2)
        assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("source")] == []

    def test_a_calibration_of_another_format(self, tmp_path: Path) -> None:
        config = small()
        source = checked(written(tmp_path / "source", config, hf_tensors(config), "BF16"))
        with pytest.raises(SourceError, match="the calibration has no"):
            convert(source, tmp_path / "out", dtype="auto", scheme=Scheme("int4_awq"), calibration=Calibration({}))
