"""Sources quantized by other people's tools: what lpx writes stands for the same numbers.

Both sides are read from their files and dequantized here, by the formulas of the formats; lpx's own readers take no
part, except where they are what is tested. The sources were made by tests/reference/quantized_sources.py with ModelOpt,
compressed-tensors, AutoGPTQ and AutoAWQ; their plain weights follow from the names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.quantization import FORMATS
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check
from lpxbuild.source.checks import check_config
from lpxbuild.source.quantized.arrays import mapped
from lpxbuild.source.quantized.modelopt import ALGORITHMS as MODELOPT

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
from named_weights import bfloat16_bits

DATA = Path(__file__).parent / "quantized"
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
SHAPES = {
    f"{ATTENTION}.q_proj": (128, 128),
    f"{ATTENTION}.k_proj": (64, 128),
    f"{ATTENTION}.v_proj": (64, 128),
    f"{ATTENTION}.o_proj": (128, 128),
    f"{MLP}.gate_proj": (128, 128),
    f"{MLP}.up_proj": (128, 128),
    f"{MLP}.down_proj": (128, 128),
}
TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
Arrays = dict[str, Any]


def tensors_of(file: Path) -> Arrays:
    """All tensors of a safetensors file, by the format's description."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def f32(values: Any) -> Any:
    return np.asarray(values).astype(np.float32)


def nibbles(words: Any) -> Any:
    """int32 words → their eight 4-bit numbers, lowest first, in a new last dimension."""
    return words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32)) & 15


def plain(module: str) -> Any:
    """The weight before somebody quantized it."""
    return f32(bfloat16_bits(f"{module}.weight", SHAPES[module]).view(ml_dtypes.bfloat16))


# What the sources stand for ---------------------------------------------------------------------------------------


def of_fp8(t: Arrays, m: str) -> Any:
    return f32(t[f"{m}.weight"]) * f32(t[f"{m}.weight_scale"]).reshape(-1, 1)


def of_nvfp4(t: Arrays, m: str) -> Any:
    packed = t[f"{m}.weight"]
    values = np.stack([FP4[packed & 15], FP4[packed >> 4]], -1).reshape(SHAPES[m])
    scales = f32(t[f"{m}.weight_scale"]) * t[f"{m}.weight_scale_2"]
    return values * np.repeat(scales, 16, 1)


def of_row_pairs(t: Arrays, m: str) -> Any:
    packed = t[f"{m}.weight"].astype(np.int32)
    codes = np.stack([packed & 15, packed >> 4 & 15], 1).reshape(SHAPES[m])
    scales = t[f"{m}.weight_scale"]
    weight = f32((codes + 8) % 16 - 8) * np.repeat(scales, SHAPES[m][1] // scales.shape[1], 1)
    return weight * f32(t[f"{m}.pre_quant_scale"]) if f"{m}.pre_quant_scale" in t else weight


def of_packed(t: Arrays, m: str) -> Any:
    codes = nibbles(t[f"{m}.weight_packed"]).reshape(SHAPES[m]).astype(np.float32) - 8
    scales = f32(t[f"{m}.weight_scale"])
    if f"{m}.weight_zero_point" in t:
        zeros = nibbles(t[f"{m}.weight_zero_point"]).transpose(0, 2, 1).reshape(scales.shape).astype(np.float32) - 8
        codes = codes - np.repeat(zeros, SHAPES[m][1] // zeros.shape[1], 1)
    return codes * np.repeat(scales, SHAPES[m][1] // scales.shape[1], 1)


def of_gptq(t: Arrays, m: str) -> Any:
    out, into = SHAPES[m]
    codes = nibbles(t[f"{m}.qweight"]).transpose(0, 2, 1).reshape(into, out)
    zeros = nibbles(t[f"{m}.qzeros"]).reshape(-1, out) + 1
    group = t[f"{m}.g_idx"]
    return ((codes.astype(np.float32) - f32(zeros)[group]) * f32(t[f"{m}.scales"])[group]).T


def of_awq(t: Arrays, m: str) -> Any:
    out, into = SHAPES[m]
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    codes = nibbles(t[f"{m}.qweight"])[..., order].reshape(into, out).astype(np.float32)
    zeros = nibbles(t[f"{m}.qzeros"])[..., order].reshape(-1, out).astype(np.float32)
    size = into // len(zeros)
    return ((codes - np.repeat(zeros, size, 0)) * np.repeat(f32(t[f"{m}.scales"]), size, 0)).T


FORMULAS = {
    "modelopt_fp8_kv": of_fp8,
    "modelopt_fp8_pc_pt": of_fp8,
    "modelopt_nvfp4": of_nvfp4,
    "modelopt_int4_awq": of_row_pairs,
    "modelopt_w4a8_awq": of_row_pairs,
    "ct_fp8_static": of_fp8,
    "ct_fp8_dynamic": of_fp8,
    "ct_int8": of_fp8,
    "ct_w4a16_group": of_packed,
    "ct_w4a16_channel": of_packed,
    "ct_w4a16_asymmetric": of_packed,
    "gptq": of_gptq,
    "gptq_rows": of_gptq,
    "gptq_asymmetric": of_gptq,
    "awq": of_awq,
}
STEP = {"int4": 0.08, "fp8": 0.04, "fp4": 0.17}
"""Largest error of a format against the plain weight, in units of the largest weight: half a step, and the scale's."""


def test_the_formulas_agree_with_the_tools() -> None:
    for name, formula in FORMULAS.items():
        if name.endswith("_awq"):
            continue  # factors of the input have moved between weight and norm
        bound = STEP["fp8" if "fp8" in name or "int8" in name else "fp4" if "nvfp4" in name else "int4"]
        stored = tensors_of(DATA / name / "model.safetensors")
        for module in SHAPES:
            weight = plain(module)
            assert np.abs(formula(stored, module) - weight).max() < bound * np.abs(weight).max(), (name, module)


# Reading ----------------------------------------------------------------------------------------------------------


def source_of(name: str, **options: Any) -> Source:
    return check(DATA / name, origin=name, need_tokenizer=False, output=Output.quiet(), **options)


@pytest.mark.parametrize("name", FORMULAS)
def test_dense_rows_are_those_of_the_formula(name: str) -> None:
    source = source_of(name)
    stored, read = tensors_of(DATA / name / "model.safetensors"), mapped(source.tensors)
    assert source.quantization is not None
    assert set(source.quantization.linears) == set(SHAPES)
    for module, shape in SHAPES.items():
        linear = source.quantization.linears[module]
        expected = FORMULAS[name](stored, module)
        assert linear.shape == shape
        assert np.array_equal(linear.dense(read, 0, shape[0]), expected), module
        assert np.array_equal(linear.dense(read, 5, 22), expected[5:22]), module


@pytest.mark.parametrize(
    ("name", "method", "format", "group", "kv_cache"),
    [
        ("modelopt_fp8_kv", "modelopt", "fp8", 128, "fp8"),
        ("modelopt_fp8_pc_pt", "modelopt", "fp8_pc_pt", 128, "none"),
        ("modelopt_nvfp4", "modelopt", "nvfp4", 128, "none"),
        ("modelopt_int4_awq", "modelopt", "int4_awq", 64, "none"),
        ("modelopt_w4a8_awq", "modelopt", "w4a8_awq", 128, "none"),
        ("ct_fp8_static", "compressed-tensors", "fp8", 128, "fp8"),
        ("ct_fp8_dynamic", "compressed-tensors", "fp8_pc_pt", 128, "none"),
        ("ct_int8", "compressed-tensors", None, 128, "none"),
        ("ct_w4a16_group", "compressed-tensors", "int4_rtn", 64, "none"),
        ("ct_w4a16_channel", "compressed-tensors", "int4_rtn", 128, "none"),
        ("ct_w4a16_asymmetric", "compressed-tensors", None, 128, "none"),
        ("gptq", "gptq", "int4_rtn", 64, "none"),
        ("gptq_rows", "gptq", "int4_rtn", 128, "none"),
        ("gptq_asymmetric", "gptq", None, 64, "none"),
        ("awq", "awq", None, 64, "none"),
    ],
)
def test_what_the_settings_say(name: str, method: str, format: str | None, group: int, kv_cache: str) -> None:
    quantization = source_of(name).quantization
    assert quantization is not None
    assert (quantization.method, quantization.format) == (method, format)
    assert (quantization.group_size, quantization.kv_cache) == (group, kv_cache)
    assert ("tensorrt_llm" in quantization.layouts) == (format is not None)
    assert "unified_hf" in quantization.layouts


# TensorRT-LLM's layout ----------------------------------------------------------------------------------------------


def converted(name: str, folder: Path, tensor_parallel: int = 1) -> tuple[dict[str, Any], list[Arrays]]:
    source = source_of(name, layout="tensorrt_llm", scheme=Scheme(), tensor_parallel=tensor_parallel)
    convert(source, folder, dtype="auto", tensor_parallel=tensor_parallel, output=Output.quiet())
    ranks = [tensors_of(folder / f"rank{rank}.safetensors") for rank in range(tensor_parallel)]
    return json.loads((folder / "config.json").read_text()), ranks


def in_ranks(modules: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    """Whole matrices as TensorRT-LLM's linears of each rank (`modules` by the last word of their name)."""

    def rows(name: str, rank: int) -> Any:
        return np.split(modules[name], ranks, 0)[rank]

    def columns(name: str, rank: int) -> Any:
        return np.split(modules[name], ranks, 1)[rank]

    return [
        {
            "attention.qkv": np.concatenate([rows(f"{part}_proj", rank) for part in "qkv"]),
            "attention.dense": columns("o_proj", rank),
            "mlp.fc": rows("gate_proj", rank),
            "mlp.gate": rows("up_proj", rank),
            "mlp.proj": columns("down_proj", rank),
        }
        for rank in range(ranks)
    ]


def short(module: str) -> str:
    return module.rpartition(".")[2]


def stands_for(t: Arrays, linear: str) -> Any:
    """What one linear of a rank file stands for, by the table of quantized tensors of TensorRT-LLM's checkpoints."""
    prefix = f"transformer.layers.0.{linear}."
    weight = t[f"{prefix}weight"]
    if f"{prefix}per_channel_scale" in t:
        return f32(weight) * t[f"{prefix}per_channel_scale"][:, None]
    scale = t[f"{prefix}weights_scaling_factor"]
    if weight.dtype == ml_dtypes.float8_e4m3fn:
        return f32(weight) * scale
    if weight.dtype == np.uint8:
        values = np.stack([FP4[weight & 15], FP4[weight >> 4]], -1).reshape(len(weight), -1)
        return values * np.repeat(f32(scale) * t[f"{prefix}weights_scaling_factor_2"], 16, 1)
    packed = weight.astype(np.int32)
    codes = np.stack([packed & 15, packed >> 4 & 15], 1).reshape(-1, weight.shape[1])
    values = f32((codes + 8) % 16 - 8) * np.repeat(scale, weight.shape[1] // scale.shape[1], 1)
    factors = t.get(f"{prefix}prequant_scaling_factor")
    return values if factors is None else values * f32(factors)


ALGORITHMS = {
    "modelopt_fp8_kv": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "modelopt_fp8_pc_pt": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "modelopt_nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    "modelopt_int4_awq": {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": True},
    "modelopt_w4a8_awq": {"quant_algo": "W4A8_AWQ", "group_size": 128, "pre_quant_scale": True},
    "ct_fp8_static": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    "ct_fp8_dynamic": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "ct_w4a16_group": {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": False},
    "ct_w4a16_channel": {"quant_algo": "W4A16_AWQ", "group_size": 128, "pre_quant_scale": False},
    "gptq": {"quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": False},
    "gptq_rows": {"quant_algo": "W4A16_AWQ", "group_size": 128, "pre_quant_scale": False},
}
WHOLE_GROUPS_ONLY = ("modelopt_w4a8_awq", "ct_w4a16_channel", "gptq_rows")
"""Groups of 128 in 128 input features: no second rank can have a whole one."""


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, ranks) for name in ALGORITHMS for ranks in (1, 2) if ranks == 1 or name not in WHOLE_GROUPS_ONLY],
)
def test_trtllm_stands_for_the_source(name: str, ranks: int, tmp_path: Path) -> None:
    config, files = converted(name, tmp_path / "checkpoint", ranks)
    for key, value in ALGORITHMS[name].items():
        assert config["quantization"][key] == value
    stored = tensors_of(DATA / name / "model.safetensors")
    values = {short(module): FORMULAS[name](stored, module) for module in SHAPES}
    if ALGORITHMS[name]["quant_algo"] == "FP8":
        # q, k and v share the largest of their scales: each number goes to the nearest one under it.
        common = max(float(f32(stored[f"{ATTENTION}.{part}_proj.weight_scale"]).max()) for part in "qkv")
        for part in "qkv":
            quotient = values[f"{part}_proj"] / np.float32(common)
            values[f"{part}_proj"] = f32(quotient.astype(ml_dtypes.float8_e4m3fn)) * np.float32(common)
    for rank, expected in enumerate(in_ranks(values, ranks)):
        for linear, matrix in expected.items():
            assert np.array_equal(stands_for(files[rank], linear), matrix), (rank, linear)


@pytest.mark.parametrize("name", WHOLE_GROUPS_ONLY)
def test_a_split_through_a_group_is_refused(name: str) -> None:
    with pytest.raises(SourceError, match="tensor parallel 2") as refusal:
        source_of(name, layout="tensorrt_llm", scheme=Scheme(), tensor_parallel=2)
    assert "parallel.tensor to one of: 1" in refusal.value.next


@pytest.mark.parametrize("name", ["modelopt_fp8_kv", "ct_fp8_static", "modelopt_nvfp4", "modelopt_w4a8_awq"])
def test_scales_of_the_inputs_are_the_largest_of_what_is_stacked(name: str, tmp_path: Path) -> None:
    _, (rank,) = converted(name, tmp_path / "checkpoint")
    stored = tensors_of(DATA / name / "model.safetensors")
    for linear, modules in {
        "attention.qkv": [f"{ATTENTION}.{part}_proj" for part in "qkv"],
        "attention.dense": [f"{ATTENTION}.o_proj"],
        "mlp.fc": [f"{MLP}.gate_proj"],
        "mlp.proj": [f"{MLP}.down_proj"],
    }.items():
        largest = max(float(f32(stored[f"{module}.input_scale"]).max()) for module in modules)
        found = rank[f"transformer.layers.0.{linear}.activation_scaling_factor"]
        assert found.dtype == np.float32
        assert float(found.reshape(-1)[0]) == largest


@pytest.mark.parametrize("name", ["modelopt_fp8_kv", "ct_fp8_static"])
def test_scales_of_the_cache_are_at_least_one(name: str, tmp_path: Path) -> None:
    """TensorRT-LLM's layout has max(amax / 448, 1), as ModelOpt writes it there; these sources have smaller ones."""
    _, (rank,) = converted(name, tmp_path / "checkpoint")
    assert rank["transformer.layers.0.attention.kv_cache_scaling_factor"] == 1.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_not_quantized_is_as_in_the_source(name: str, tmp_path: Path) -> None:
    _, (rank,) = converted(name, tmp_path / "checkpoint")
    stored = tensors_of(DATA / name / "model.safetensors")
    for target, origin in {
        "transformer.vocab_embedding.weight": "model.embed_tokens.weight",
        "transformer.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }.items():
        assert rank[target].tobytes() == stored[origin].tobytes()


# The unified layout -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMULAS)
def test_unified_files_are_the_sources_own(name: str, tmp_path: Path) -> None:
    source = source_of(name, layout="unified_hf", scheme=Scheme())
    convert_unified(source, tmp_path / "checkpoint", dtype="auto", output=Output.quiet())
    for file in DATA.joinpath(name).iterdir():
        found = (tmp_path / "checkpoint" / file.name).read_bytes()
        assert hashlib.sha256(found).digest() == hashlib.sha256(file.read_bytes()).digest(), file.name


RENAMED = {
    "ct_fp8_static": ("FP8", of_fp8),
    "ct_fp8_dynamic": ("FP8_PER_CHANNEL_PER_TOKEN", of_fp8),
    "ct_w4a16_group": ("W4A16_AWQ", of_row_pairs),
    "ct_w4a16_channel": ("W4A16_AWQ", of_row_pairs),
    "gptq": ("W4A16_AWQ", of_row_pairs),
    "gptq_rows": ("W4A16_AWQ", of_row_pairs),
}
"""Sources that backend pytorch gets under ModelOpt's names."""


@pytest.mark.parametrize("name", RENAMED)
def test_unified_for_pytorch_has_the_names_of_modelopt(name: str, tmp_path: Path) -> None:
    algorithm, formula = RENAMED[name]
    source = source_of(name, layout="unified_hf", scheme=Scheme())
    convert_unified(source, tmp_path / "c", dtype="auto", backend="pytorch", output=Output.quiet())
    before, after = (tensors_of(folder / "model.safetensors") for folder in (DATA / name, tmp_path / "c"))
    for module in SHAPES:
        assert np.array_equal(formula(after, module), FORMULAS[name](before, module)), module
    settings = json.loads((tmp_path / "c" / "hf_quant_config.json").read_text())["quantization"]
    assert settings["quant_algo"] == algorithm
    assert "lm_head" in settings["exclude_modules"]
    assert json.loads((tmp_path / "c" / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"
    if algorithm == "W4A16_AWQ":
        assert settings["group_size"] == 128 // after[f"{MLP}.up_proj.weight_scale"].shape[1]
    # ModelOpt's names are read again, and mean the same.
    again = check(tmp_path / "c", origin="c", need_tokenizer=False, output=Output.quiet()).quantization
    assert again is not None
    assert again.format == source.quantization.format  # type: ignore[union-attr]
    for key, attention in (("k", f"{ATTENTION}.k_proj.k_scale"), ("v", f"{ATTENTION}.v_proj.v_scale")):
        if again.kv_cache == "fp8":
            assert float(after[attention]) == float(f32(before[f"{ATTENTION}.{key}_scale"]).reshape(-1)[0])


@pytest.mark.parametrize(
    ("name", "backend", "others"),
    [
        ("awq", "pytorch", "set backend to vllm"),
        ("ct_int8", "pytorch", "set backend to vllm"),
        ("gptq_asymmetric", "pytorch", "set backend to vllm"),
        ("modelopt_int4_awq", "vllm", "set backend to pytorch"),
        ("modelopt_w4a8_awq", "vllm", "set backend to pytorch"),
    ],
)
def test_a_backend_that_does_not_load_the_files_is_refused(name: str, backend: str, others: str) -> None:
    with pytest.raises(SourceError, match=f"backend {backend} is not known to load") as refusal:
        source_of(name, layout="unified_hf", scheme=Scheme(), backend=backend)
    assert str(refusal.value.next).startswith(others)
    right = others.split()[-1]
    source_of(name, layout="unified_hf", scheme=Scheme(), backend=right)


def test_modelopts_loaders_are_those_of_the_formats() -> None:
    """A recipe's format and a source of it get the same answer from every backend."""
    formats = {row.quant_algo: row for row in FORMATS.values() if row.quant_algo and "unified_hf" in row.layouts}
    for algorithm, (_, loaders) in MODELOPT.items():
        backends = formats[algorithm].backends if algorithm in formats else ()
        assert set(loaders) == {"pytorch", "vllm"} & set(backends), algorithm


def test_groups_that_no_kernel_has_are_not_renamed(tmp_path: Path) -> None:
    """ModelOpt's names with groups of 32: TensorRT-LLM has 64 and 128."""
    folder = tmp_path / "source"
    shutil.copytree(DATA / "gptq", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 32
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match="backend pytorch is not known"):
        check_config(folder, layout="unified_hf", scheme=Scheme(), backend="pytorch")


def test_another_dtype_is_no_reason_to_touch_the_files(tmp_path: Path) -> None:
    output = Output.quiet()
    convert_unified(source_of("awq"), tmp_path / "c", dtype="bfloat16", output=output)
    assert "float16, not bfloat16" in output.notices[0]


# transformers -------------------------------------------------------------------------------------------------------

EXACT_INPUTS = ("ct_w4a16_group", "ct_w4a16_channel")
"""Sources whose inputs are not quantized: transformers computes with what their weights stand for, and nothing else.
(It does not load zero points of compressed-tensors.)"""


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory, reference_python: Path) -> Path:
    """Passed-on checkpoints, and plain ones of what their weights stand for, each with transformers' logits."""
    known = subprocess.run([reference_python, "-c", "import compressed_tensors"], capture_output=True)
    if known.returncode:
        pytest.skip("the reference environment has no compressed-tensors, without which transformers loads none of it")
    folder = tmp_path_factory.mktemp("loaded")
    for name in EXACT_INPUTS:
        convert_unified(source_of(name), folder / name, dtype="auto", backend="vllm", output=Output.quiet())
        stored = tensors_of(folder / name / "model.safetensors")
        plain = {
            key: f32(values) for key, values in stored.items() if key.endswith(("embed_tokens.weight", "norm.weight"))
        }
        plain |= {key: f32(values) for key, values in stored.items() if key == "lm_head.weight"}
        plain |= {f"{module}.weight": FORMULAS[name](stored, module) for module in SHAPES}
        (folder / f"{name}-plain").mkdir()
        config = json.loads((folder / name / "config.json").read_text())
        config.pop("quantization_config")
        (folder / f"{name}-plain" / "config.json").write_text(json.dumps(config))
        save_file(plain, folder / f"{name}-plain" / "model.safetensors", metadata={"format": "pt"})
    script = Path(__file__).parents[1] / "reference" / "folder_logits.py"
    folders = [folder / name for plain in EXACT_INPUTS for name in (plain, f"{plain}-plain")]
    done = subprocess.run([reference_python, script, *folders], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", EXACT_INPUTS)
def test_transformers_loads_what_was_passed_on(name: str, loaded: Path) -> None:
    found, expected = (np.load(loaded / folder / "logits.npy") for folder in (name, f"{name}-plain"))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


# Refusals ---------------------------------------------------------------------------------------------------------


def edited(name: str, folder: Path, **settings: Any) -> Path:
    """A copy of a source with other quantization settings."""
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["awq", "gptq_asymmetric", "ct_w4a16_asymmetric"])
def test_zero_points_have_no_place_in_trtllm(name: str) -> None:
    with pytest.raises(SourceError, match="cannot become a TensorRT-LLM checkpoint") as refusal:
        source_of(name, layout="tensorrt_llm", scheme=Scheme())
    assert "zero points" in refusal.value.why
    assert "vllm" in refusal.value.next


@pytest.mark.parametrize("layout", ["tensorrt_llm", "unified_hf"])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_second_quantization_is_refused(name: str, layout: Any) -> None:
    with pytest.raises(SourceError, match="int8_wo would quantize it a second time"):
        source_of(name, layout=layout, scheme=Scheme("int8_wo"))


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("gptq", {"desc_act": True}, "desc_act"),
        ("gptq", {"bits": 3}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("ct_w4a16_group", {"sparsity_config": {"format": "sparse-24"}}, "sparse"),
        ("ct_fp8_static", {"kv_cache_scheme": {"num_bits": 4, "type": "int"}}, "kv_cache_scheme"),
    ],
)
def test_kinds_that_are_not_read(name: str, settings: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError) as refusal:
        check(edited(name, tmp_path / "s", **settings), origin="s", need_tokenizer=False, output=Output.quiet())
    assert word in refusal.value.what


def test_the_format_it_has_can_be_asked_for() -> None:
    assert source_of("modelopt_int4_awq", layout="tensorrt_llm", scheme=Scheme("int4_awq")).quantization is not None
    assert source_of("gptq", layout="tensorrt_llm", scheme=Scheme("int4_rtn")).quantization is not None
    assert source_of("ct_fp8_static", layout="unified_hf", scheme=Scheme("fp8", "fp8")).quantization is not None
