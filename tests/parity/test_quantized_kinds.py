"""Kinds of quantized sources that no tool at hand writes, made from the others' files by the format's definition."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check
from lpxbuild.source.quantized.arrays import mapped

DATA = Path(__file__).parent / "quantized"
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
LINEARS = [f"{ATTENTION}.{part}_proj" for part in "qkvo"] + [f"{MLP}.{part}_proj" for part in ("gate", "up", "down")]
Arrays = dict[str, Any]
NAMES = {
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("i4"),
    "I64": np.dtype("i8"),
}


def tensors_of(file: Path) -> Arrays:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], NAMES[entry["dtype"]]).reshape(entry["shape"]).copy()
    return found


def write_tensors(file: Path, tensors: Arrays) -> None:
    kinds = {dtype: name for name, dtype in NAMES.items()}
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": kinds[values.dtype], "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(values).tobytes() for values in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


Edit = Callable[[Arrays, dict[str, Any]], None]
Change = Callable[[str, Edit], Path]


@pytest.fixture
def change(tmp_path: Path) -> Change:
    """A copy of a source with other tensors and another config.json."""

    def run(name: str, edit: Edit) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(DATA / name, folder)
        tensors, config = tensors_of(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        edit(tensors, config)
        write_tensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return run


def checked(folder: Path, layout: Any = "tensorrt_llm", **options: Any) -> Source:
    return check(
        folder, origin="x", need_tokenizer=False, layout=layout, scheme=Scheme(), output=Output.quiet(), **options
    )


def written(folder: Path) -> Arrays:
    target = folder.parent / "checkpoint"
    convert(checked(folder), target, dtype="auto", output=Output.quiet())
    return tensors_of(target / "rank0.safetensors")


def dense(folder: Path) -> Arrays:
    source = checked(folder, None)
    assert source.quantization is not None
    read = mapped(source.tensors)
    return {name: one.dense(read, 0, one.shape[0]) for name, one in source.quantization.linears.items()}


# GPTQ -------------------------------------------------------------------------------------------------------------


def test_gptq_v2_stores_zero_points_as_they_are(change: Change) -> None:
    def second(tensors: Arrays, config: dict[str, Any]) -> None:
        for module in LINEARS:
            tensors[f"{module}.qzeros"] += 0x11111111  # 7 → 8 in every nibble
        config["quantization_config"]["checkpoint_format"] = "gptq_v2"

    before = dense(DATA / "gptq")
    folder = change("gptq", second)
    assert all(np.array_equal(values, before[name]) for name, values in dense(folder).items())
    whole = written(folder)
    convert(checked(DATA / "gptq"), folder.parent / "first", dtype="auto", output=Output.quiet())
    first = tensors_of(folder.parent / "first" / "rank0.safetensors")
    assert all(np.array_equal(values, first[name]) for name, values in whole.items())


def zero_point(tensors: Arrays, _config: dict[str, Any]) -> None:
    tensors[f"{MLP}.down_proj.qzeros"][1, 3] = 0x77787777


def order(tensors: Arrays, _config: dict[str, Any]) -> None:
    tensors[f"{MLP}.up_proj.g_idx"][[0, 64]] = [1, 0]


def bias(tensors: Arrays, _config: dict[str, Any]) -> None:
    tensors[f"{ATTENTION}.o_proj.bias"] = np.array([0] * 127 + [1], np.float16)


@pytest.mark.parametrize(
    ("edit", "tensor", "word"),
    [
        (zero_point, "down_proj.qzeros", "zero points"),
        (order, "up_proj.g_idx", "desc_act"),
        (bias, "o_proj.bias", "zero"),
    ],
)
@pytest.mark.parametrize("layout", ["tensorrt_llm", "unified_hf"])
def test_gptq_tensors_that_belie_the_settings(change: Change, edit: Edit, tensor: str, word: str, layout: str) -> None:
    folder = change("gptq", edit)
    with pytest.raises(SourceError) as refusal:
        checked(folder, layout)
    assert tensor in refusal.value.what
    assert word in refusal.value.what


@pytest.mark.parametrize("layout", ["tensorrt_llm", "unified_hf"])
def test_the_conversion_looks_at_what_the_check_had_no_time_for(
    change: Change, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpxbuild.source.checks.CONTENTS", 1)
    folder = change("gptq", zero_point)
    source, target = checked(folder, layout), folder.parent / "checkpoint"
    write: Callable[..., object] = convert if layout == "tensorrt_llm" else convert_unified
    with pytest.raises(SourceError, match=r"down_proj\.qzeros"):
        write(source, target, dtype="auto", output=Output.quiet())
    assert not target.exists()


def test_gptq_biases_that_say_nothing_are_left_out(change: Change) -> None:
    def zeros(tensors: Arrays, _config: dict[str, Any]) -> None:
        tensors |= {f"{module}.bias": np.zeros(tensors[f"{module}.scales"].shape[1], np.float16) for module in LINEARS}

    assert not [name for name in written(change("gptq", zeros)) if name.endswith(".bias")]


@pytest.mark.parametrize(
    ("bits", "code"),
    [
        (8, lambda random, shape: random.integers(0, 256, shape)),
        (2, lambda random, shape: random.integers(0, 4, shape)),
    ],
)
def test_gptq_with_other_bits_goes_to_the_unified_layout_only(change: Change, bits: int, code: Any) -> None:
    random, expected = np.random.default_rng(2), {}
    middle = 1 << (bits - 1)

    def repack(tensors: Arrays, config: dict[str, Any]) -> None:
        for module in LINEARS:
            groups, out = tensors[f"{module}.scales"].shape
            codes = code(random, (groups * 64, out)).astype(np.uint32)
            words = np.zeros((len(codes) * bits // 32, out), np.uint32)
            for place in range(32 // bits):
                words |= codes[place :: 32 // bits] << np.uint32(bits * place)
            tensors[f"{module}.qweight"] = words.view(np.int32)
            stored = sum((middle - 1) << (bits * place) for place in range(32 // bits))
            tensors[f"{module}.qzeros"] = np.full((groups, out * bits // 32), stored, np.int64).astype(np.int32)
            scales = np.repeat(tensors[f"{module}.scales"].astype(np.float32), 64, 0)
            expected[module] = ((codes.astype(np.float32) - middle) * scales).T
        config["quantization_config"]["bits"] = bits

    folder = change("gptq", repack)
    assert all(np.array_equal(values, expected[name]) for name, values in dense(folder).items())
    checked(folder, "unified_hf")
    with pytest.raises(SourceError, match="cannot become a TensorRT-LLM checkpoint") as refusal:
        checked(folder)
    assert f"{bits}-bit" in refusal.value.why


# FP8 --------------------------------------------------------------------------------------------------------------


def test_fp8_blocks_go_to_the_unified_layout_only(change: Change) -> None:
    expected: Arrays = {}

    def blocks(tensors: Arrays, config: dict[str, Any]) -> None:
        random = np.random.default_rng(4)
        for module in LINEARS:
            codes = tensors[f"{module}.weight"]
            scales = random.uniform(1e-4, 1e-3, (-(-len(codes) // 48), 4)).astype(np.float32)
            tensors.pop(f"{module}.weight_scale")
            tensors[f"{module}.weight_scale_inv"] = scales
            rows = np.arange(len(codes)) // 48
            expected[module] = codes.astype(np.float32) * scales[rows][:, np.arange(128) // 32]
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [48, 32],
            "modules_to_not_convert": ["lm_head"],
        }

    folder = change("ct_fp8_dynamic", blocks)
    assert all(np.array_equal(values, expected[name]) for name, values in dense(folder).items())
    source = checked(folder, None)
    assert np.array_equal(
        source.quantization.linears[LINEARS[0]].dense(mapped(source.tensors), 40, 100),  # type: ignore[union-attr]
        expected[LINEARS[0]][40:100],
    )
    checked(folder, "unified_hf")
    with pytest.raises(SourceError) as refusal:
        checked(folder)
    assert "blocks" in refusal.value.why


@pytest.mark.parametrize(("scheme", "format"), [("static", "fp8"), ("dynamic", "fp8_pc_pt")])
def test_auto_fp8_has_one_scale_for_a_matrix(change: Change, scheme: str, format: str) -> None:
    def renamed(tensors: Arrays, config: dict[str, Any]) -> None:
        for module in LINEARS:
            for key in ("weight_scale", "input_scale"):
                tensors[f"{module}.{key}"] = tensors[f"{module}.{key}"].astype(np.float32).reshape(())
            if scheme == "dynamic":
                tensors.pop(f"{module}.input_scale")
        for key in "kv":
            tensors.pop(f"{ATTENTION}.{key}_scale")
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": scheme,
            "ignored_layers": ["lm_head"],
        }

    folder = change("ct_fp8_static", renamed)
    assert checked(folder).quantization.format == format  # type: ignore[union-attr]
    values, rank = dense(folder), written(folder)
    prefix = "transformer.layers.0.mlp.proj."
    scale = rank[f"{prefix}{'weights_scaling_factor' if scheme == 'static' else 'per_channel_scale'}"]
    assert len(scale) == (1 if scheme == "static" else 128)
    assert np.array_equal(rank[f"{prefix}weight"].astype(np.float32) * scale.reshape(-1, 1), values[f"{MLP}.down_proj"])


def test_fixed_input_scales_beside_row_scales_are_said(change: Change) -> None:
    def static(tensors: Arrays, config: dict[str, Any]) -> None:
        tensors |= {f"{module}.input_scale": np.full(1, 0.02, ml_dtypes.bfloat16) for module in LINEARS}
        inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = inputs

    folder = change("ct_fp8_dynamic", static)
    source = checked(folder)
    assert source.quantization.format == "fp8_pc_pt"  # type: ignore[union-attr]
    assert any("for each token" in notice for notice in source.notices)
    assert not [name for name in written(folder) if "activation" in name]


def test_fp8_weights_with_plain_inputs_have_no_place_in_trtllm(change: Change) -> None:
    def plain(_tensors: Arrays, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None

    folder = change("ct_fp8_dynamic", plain)
    checked(folder, "unified_hf")
    with pytest.raises(SourceError, match="cannot become"):
        checked(folder)


# NVFP4 of compressed-tensors ----------------------------------------------------------------------------------------


def test_nvfp4_with_inverse_global_scales(change: Change) -> None:
    before = dense(DATA / "modelopt_nvfp4")

    def renamed(tensors: Arrays, config: dict[str, Any]) -> None:
        for module in LINEARS:
            tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight")
            for own, theirs in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
                tensors[f"{module}.{theirs}"] = (1 / tensors.pop(f"{module}.{own}")).reshape(1).astype(np.float32)
        four = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": four, "input_activations": four}},
            "ignore": ["lm_head"],
        }

    folder = change("modelopt_nvfp4", renamed)
    (folder / "hf_quant_config.json").unlink()
    for name, values in dense(folder).items():
        assert np.allclose(values, before[name], rtol=3e-7, atol=0), name  # an inverse of an inverse: one rounding each
    rank = written(folder)
    packed = tensors_of(DATA / "modelopt_nvfp4" / "model.safetensors")[f"{MLP}.down_proj.weight"]
    assert np.array_equal(rank["transformer.layers.0.mlp.proj.weight"], packed)
    assert rank["transformer.layers.0.mlp.proj.weights_scaling_factor_2"].shape == ()


# Lists and mixtures -------------------------------------------------------------------------------------------------


def test_an_ignored_module_is_plain(change: Change) -> None:
    plain = np.arange(128 * 128, dtype=np.float32).reshape(128, 128).astype(ml_dtypes.bfloat16)

    def ignore(tensors: Arrays, config: dict[str, Any]) -> None:
        for key in ("weight_packed", "weight_scale", "weight_shape"):
            tensors.pop(f"{MLP}.down_proj.{key}")
        tensors[f"{MLP}.down_proj.weight"] = plain
        config["quantization_config"]["ignore"] = ["lm_head", "re:.*down_proj$"]

    folder = change("ct_w4a16_group", ignore)
    assert checked(folder).quantization.unquantized == (f"{MLP}.down_proj",)  # type: ignore[union-attr]
    rank = written(folder)
    assert np.array_equal(rank["transformer.layers.0.mlp.proj.weight"], plain)
    assert rank["transformer.layers.0.mlp.fc.weight"].dtype == np.int8
    config = json.loads((folder.parent / "checkpoint" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] in ("W4A16_AWQ", "MIXED_PRECISION")


def test_a_list_that_contradicts_the_tensors_is_refused(change: Change) -> None:
    def ignore(_tensors: Arrays, config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"] = ["lm_head", f"{MLP}.down_proj"]

    with pytest.raises(SourceError, match=r"down_proj\.weight"):
        checked(change("ct_w4a16_group", ignore))


def test_part_of_a_stacked_linear_cannot_stay_plain(change: Change) -> None:
    def ignore(tensors: Arrays, config: dict[str, Any]) -> None:
        for key in ("weight", "weight_scale"):
            tensors.pop(f"{ATTENTION}.q_proj.{key}")
        tensors[f"{ATTENTION}.q_proj.weight"] = np.zeros((128, 128), ml_dtypes.bfloat16)
        config["quantization_config"]["ignore"] = ["lm_head", f"{ATTENTION}.q_proj"]

    folder = change("ct_fp8_dynamic", ignore)
    checked(folder, "unified_hf")
    with pytest.raises(SourceError, match="cannot become") as refusal:
        checked(folder)
    assert f"{ATTENTION}.q_proj" in refusal.value.why
    assert "fp8_pc_pt and none" in refusal.value.why


def test_modelopt_with_a_format_for_each_layer(change: Change) -> None:
    other = tensors_of(DATA / "modelopt_nvfp4" / "model.safetensors")

    def mix(tensors: Arrays, _config: dict[str, Any]) -> None:
        for key in ("weight", "weight_scale", "input_scale"):
            tensors.pop(f"{MLP}.down_proj.{key}")
        prefix = f"{MLP}.down_proj."
        tensors |= {name: values for name, values in other.items() if name.startswith(prefix)}

    folder = change("modelopt_fp8_kv", mix)
    path = folder / "hf_quant_config.json"
    settings = json.loads(path.read_text())
    layers = {module: {"quant_algo": "FP8"} for module in LINEARS}
    layers[f"{MLP}.down_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    settings["quantization"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    path.write_text(json.dumps(settings))
    scheme = checked(folder).quantization.scheme  # type: ignore[union-attr]
    assert (scheme.format, scheme.overrides) == ("fp8", {f"{MLP}.down_proj": "nvfp4"})
    rank = written(folder)
    assert rank["transformer.layers.0.mlp.proj.weight"].dtype == np.uint8
    assert rank["transformer.layers.0.mlp.fc.weight"].dtype == NAMES["F8_E4M3"]
    config = json.loads((folder.parent / "checkpoint" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == "MIXED_PRECISION"


def test_a_source_without_scales_of_its_cache_has_one(change: Change) -> None:
    def drop(tensors: Arrays, _config: dict[str, Any]) -> None:
        for key in "kv":
            tensors.pop(f"{ATTENTION}.{key}_proj.{key}_scale")

    folder = change("modelopt_fp8_kv", drop)
    source = checked(folder)
    assert any("1.0" in notice and "KV cache" in notice for notice in source.notices)
    assert written(folder)["transformer.layers.0.attention.kv_cache_scaling_factor"] == 1.0


@pytest.mark.parametrize(
    ("name", "file", "settings", "method"),
    [
        ("gptq", "quantize_config.json", {"bits": 4, "group_size": 64, "sym": True, "desc_act": False}, "gptq"),
        ("awq", "quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, "awq"),
        ("modelopt_fp8_kv", "hf_quant_config.json", None, "modelopt"),
    ],
)
def test_settings_in_files_of_their_own(
    change: Change, name: str, file: str, settings: dict[str, Any] | None, method: str
) -> None:
    folder = change(name, lambda _tensors, config: config.pop("quantization_config"))
    if settings is not None:
        (folder / file).write_text(json.dumps(settings))
    found = checked(folder, "unified_hf")
    assert found.quantization is not None
    assert found.quantization.method == method
    assert file in found.quantization.where
    assert file in {one.name for one in found.files}
    assert set(found.quantization.linears) == set(LINEARS)


def test_modelopts_config_alone_is_enough(change: Change) -> None:
    """config.json does not say the group size of AWQ: the scales do."""
    folder = change("modelopt_int4_awq", lambda _tensors, _config: None)
    (folder / "hf_quant_config.json").unlink()
    quantization = checked(folder).quantization
    assert quantization is not None
    assert (quantization.format, quantization.group_size) == ("int4_awq", 64)


def test_settings_under_the_older_key(change: Change) -> None:
    def rename(_tensors: Arrays, config: dict[str, Any]) -> None:
        config["compression_config"] = config.pop("quantization_config")

    assert checked(change("ct_w4a16_group", rename)).quantization.format == "int4_rtn"  # type: ignore[union-attr]
