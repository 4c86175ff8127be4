"""Quantized sources of families whose tensors are fused, grouped, transposed or of experts.

Each source is made by hand from the format's definition: random codes and scales, and beside them the same model with
the float32 weights that they stand for. Both are converted; what the quantized linears of a rank stand for has to be
the plain tensors of that rank, to the last bit. Where the plain ones belong is tested elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.unified import check_source
from lpxbuild.errors import SourceError
from lpxbuild.families import family_for
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import check
from lpxbuild.source.checks import check_config
from lpxbuild.source.quantized.arrays import mapped
from lpxbuild.source.quantized.modules import Modules, modules_of

Arrays = dict[str, Any]
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "phi3": {**SIZES, "architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": 48,
        "n_embd": 128,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    },
    "falcon": {
        **{key: value for key, value in SIZES.items() if key not in ("intermediate_size", "num_key_value_heads")},
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": False,
        "alibi": False,
    },
    "mixtral": {
        **SIZES,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        **SIZES,
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    },
}
NAMES = {"f4": "F32", "f2": "F16", "i1": "I8", "u1": "U8", "i4": "I32", "i8": "I64"}
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def write(folder: Path, config: dict[str, Any], tensors: Arrays) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, at, blocks = {}, 0, []
    for name, values in tensors.items():
        data = np.ascontiguousarray(values).tobytes()
        kind = "F8_E4M3" if values.dtype == FP8 else NAMES[values.dtype.str[1:]]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        blocks.append(data)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def tensors_of(file: Path) -> Arrays:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    kinds = {name: np.dtype(kind) for kind, name in NAMES.items()} | {"F8_E4M3": FP8}
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            found[name] = np.frombuffer(data[begin:end], kinds[entry["dtype"]]).reshape(entry["shape"])
    return found


# Methods: (generator, module, (out, in), scale of the whole) → tensors, the numbers they stand for -----------------


def some_fp8(random: np.random.Generator, shape: tuple[int, int]) -> Any:
    return random.normal(0, 90, shape).clip(-440, 440).astype(FP8)


def fp8(random: np.random.Generator, module: str, shape: tuple[int, int], scale: Any) -> tuple[Arrays, Any]:
    codes = some_fp8(random, shape)
    stored = {"weight": codes, "weight_scale": scale, "input_scale": np.float32(random.uniform(0.01, 0.1))}
    return {f"{module}.{key}": np.asarray(value) for key, value in stored.items()}, codes.astype(np.float32) * scale


def rows8(random: np.random.Generator, module: str, shape: tuple[int, int], _scale: Any) -> tuple[Arrays, Any]:
    codes, scales = some_fp8(random, shape), random.uniform(1e-3, 2e-3, shape[0]).astype(np.float32)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}, codes.astype(np.float32) * scales[:, None]


def nvfp4(random: np.random.Generator, module: str, shape: tuple[int, int], scale: Any) -> tuple[Arrays, Any]:
    codes = random.integers(0, 16, shape, dtype=np.uint8)
    blocks = random.uniform(100, 440, (shape[0], shape[1] // 16)).astype(FP8)
    stored = {
        "weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        "weight_scale": blocks,
        "weight_scale_2": scale,
        "input_scale": np.float32(random.uniform(0.001, 0.01)),
    }
    values = FP4[codes] * np.repeat(blocks.astype(np.float32) * scale, 16, 1)
    return {f"{module}.{key}": np.asarray(value) for key, value in stored.items()}, values


def gptq(random: np.random.Generator, module: str, shape: tuple[int, int], _scale: Any) -> tuple[Arrays, Any]:
    out, into = shape
    codes = random.integers(0, 16, (into, out), dtype=np.uint32)
    words = np.zeros((into // 8, out), np.uint32)
    for place in range(8):
        words |= codes[place::8] << np.uint32(4 * place)
    scales = random.uniform(1e-3, 2e-3, (into // 64, out)).astype(np.float16)
    stored = {
        "qweight": words.view(np.int32),
        "qzeros": np.full((into // 64, out // 8), 0x77777777, np.int32),
        "scales": scales,
        "g_idx": (np.arange(into) // 64).astype(np.int32),
    }
    values = (codes.astype(np.float32) - 8) * np.repeat(scales.astype(np.float32), 64, 0)
    return {f"{module}.{key}": value for key, value in stored.items()}, np.ascontiguousarray(values.T)


def smooth4(random: np.random.Generator, module: str, shape: tuple[int, int], scale: Any) -> tuple[Arrays, Any]:
    """ModelOpt's int4 with factors of the input, one vector for all modules of the same width."""
    out, into = shape
    codes = random.integers(-8, 8, shape).astype(np.int8)
    packed = (codes[0::2] & 15) | codes[1::2] << 4
    scales = random.uniform(1e-3, 2e-3, (out, into // 64)).astype(np.float32)
    factors = np.random.default_rng(int(scale * 1e7) % 1000).uniform(0.5, 2, into).astype(np.float32)
    stored = {"weight": packed.view(np.uint8), "weight_scale": scales, "pre_quant_scale": factors}
    values = codes.astype(np.float32) * np.repeat(scales, 64, 1) * factors
    return {f"{module}.{key}": value for key, value in stored.items()}, values


Make = Callable[[np.random.Generator, str, tuple[int, int], Any], tuple[Arrays, Any]]
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
METHODS: dict[str, tuple[Make, dict[str, Any]]] = {
    "fp8": (fp8, {**MODELOPT, "quant_algo": "FP8"}),
    "fp8_pc_pt": (rows8, {**MODELOPT, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
    "nvfp4": (nvfp4, {**MODELOPT, "quant_algo": "NVFP4"}),
    "int4_awq": (smooth4, {**MODELOPT, "quant_algo": "W4A16_AWQ"}),
    "int4_rtn": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}),
}


def sources(folder: Path, family: str, method: str, *, one_scale: bool = True) -> tuple[Path, Path, Modules]:
    """A quantized source, and a plain one of the same numbers."""
    config = CONFIGS[family]
    known = family_for(config)
    shape = known.model_shape(config)
    modules = modules_of(known, shape)
    make, settings = METHODS[method]
    random = np.random.default_rng(11)
    plain: Arrays = {
        name: random.normal(0, 0.1, spec.shape).astype(np.float32)
        for name, spec in known.tensors(shape).items()
        if spec.required
    }
    quantized = dict(plain)
    scales = {name: np.float32(2e-3 * (1 + number)) for number, group in enumerate(modules.together) for name in group}
    for module, size in modules.shapes.items():
        scale = scales[module] if one_scale else np.float32(random.uniform(1e-3, 4e-3))
        stored, values = make(random, module, size, scale)
        plain[f"{module}.weight"] = values.T if module in modules.transposed else values
        quantized.pop(f"{module}.weight")
        quantized |= stored
    write(folder / "plain", config, plain)
    write(folder / "quantized", {**config, "quantization_config": settings}, quantized)
    return folder / "plain", folder / "quantized", modules


def converted(folder: Path, ranks: int, stages: int) -> list[Arrays]:
    source = check(
        folder,
        origin="x",
        need_tokenizer=False,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        layout="tensorrt_llm",
        scheme=Scheme(),
        output=Output.quiet(),
    )
    target = folder.parent / f"{folder.name}-{ranks}-{stages}"
    convert(
        source, target, dtype="auto", tensor_parallel=ranks, pipeline_parallel=stages, workers=1, output=Output.quiet()
    )
    return [tensors_of(target / f"rank{rank}.safetensors") for rank in range(ranks * stages)]


def stands_for(t: Arrays, name: str) -> Any:
    """What a linear of a rank file stands for, by the table of quantized tensors of TensorRT-LLM's checkpoints."""
    prefix = name.removesuffix("weight")
    weight = t[name]
    if f"{prefix}per_channel_scale" in t:
        return weight.astype(np.float32) * t[f"{prefix}per_channel_scale"][..., None]
    scale = t[f"{prefix}weights_scaling_factor"]
    if weight.dtype == FP8:
        return weight.astype(np.float32) * scale.reshape(*scale.shape[:-1], 1, 1)
    if weight.dtype == np.uint8:
        values = np.stack([FP4[weight & 15], FP4[weight >> 4]], -1).reshape(*weight.shape[:-1], -1)
        whole = t[f"{prefix}weights_scaling_factor_2"][..., None, None]
        return values * np.repeat(scale.astype(np.float32) * whole, 16, -1)
    packed = weight.astype(np.int32)
    codes = np.stack([packed & 15, packed >> 4 & 15], -2)
    codes = codes.reshape(*weight.shape[:-2], -1, weight.shape[-1])
    values = ((codes + 8) % 16 - 8).astype(np.float32) * np.repeat(scale, weight.shape[-1] // scale.shape[-1], -1)
    factors = t.get(f"{prefix}prequant_scaling_factor")
    return values if factors is None else values * factors[..., None, :]


@pytest.mark.parametrize(
    ("family", "method", "word"),
    [("mixtral", "fp8_pc_pt", "expert"), ("qwen2_moe", "nvfp4", "expert"), ("gpt2", "fp8_pc_pt", "LayerNorm")],
)
def test_what_tensorrt_has_no_kernels_for_names_what_is_left(
    family: str, method: str, word: str, tmp_path: Path
) -> None:
    """Another format would be a second quantization, so it is no way out."""
    _, folder, _ = sources(tmp_path, family, method)
    with pytest.raises(SourceError, match=f"already quantized.*{word}") as refusal:
        check_config(folder, layout="tensorrt_llm", scheme=Scheme(), backend="tensorrt")
    assert refusal.value.next is not None
    assert "build for backend pytorch or vllm, or give the original, unquantized model" in refusal.value.next
    assert "quantization.format" not in refusal.value.next


@pytest.mark.parametrize(
    ("method", "backend", "refused"),
    [("fp8_pc_pt", "vllm", True), ("fp8_pc_pt", "pytorch", True), ("fp8", "vllm", False), ("nvfp4", "pytorch", False)],
)
def test_experts_that_a_loader_would_misread(method: str, backend: str, refused: bool, tmp_path: Path) -> None:
    """ModelOpt's files of Mixtral get the answers of a recipe that asks for the same format."""
    _, folder, _ = sources(tmp_path, "mixtral", method)
    source = check(
        folder, origin="x", need_tokenizer=False, layout="unified_hf", backend=backend, output=Output.quiet()
    )
    if not refused:
        check_source(source, backend)
        return
    with pytest.raises(SourceError, match=r"already quantized.*an expert") as refusal:
        check_source(source, backend)
    assert "quantization.format " not in str(refusal.value.next)


PAIRS = [(family, method) for family in CONFIGS for method in METHODS]
QUICK = [("mixtral", "nvfp4", 2, 1), ("phi3", "int4_awq", 2, 1), ("gpt2", "fp8", 2, 1), ("falcon", "int4_rtn", 2, 1)]
QUICK += [("qwen2_moe", "fp8_pc_pt", 1, 1), ("mixtral", "int4_awq", 1, 1), ("mixtral", "fp8", 2, 1)]
# TensorRT-LLM does not divide Phi-3 into stages.
ALL = [
    (*pair, ranks, stages)
    for pair in PAIRS
    for ranks in (1, 2)
    for stages in (1, 2)
    if (pair[0], stages) != ("phi3", 2)
]


@pytest.mark.parametrize(
    ("family", "method", "ranks", "stages"),
    [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.full) for cell in ALL],
)
def test_every_linear_stands_for_the_plain_one(
    family: str, method: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    plain, quantized, modules = sources(tmp_path, family, method)
    source = check(quantized, origin="x", need_tokenizer=False, output=Output.quiet())
    assert source.quantization is not None
    assert set(source.quantization.linears) == set(modules.shapes)
    read, stored = mapped(source.tensors), tensors_of(plain / "model.safetensors")
    for module, linear in source.quantization.linears.items():
        values = stored[f"{module}.weight"]
        values = values.T if module in modules.transposed else values
        assert np.array_equal(linear.dense(read, 3, 20), values[3:20]), module
    seen = 0
    for expected, found in zip(converted(plain, ranks, stages), converted(quantized, ranks, stages)):
        for name, values in expected.items():
            if found[name].shape == values.shape and found[name].dtype == values.dtype:
                assert np.array_equal(found[name], values), name
            else:
                seen += 1
                assert np.array_equal(stands_for(found, name), values), name
    assert seen >= ranks * len(modules.together)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_scales_of_their_own_move_fp8_by_at_most_half_a_step(family: str, tmp_path: Path) -> None:
    plain, quantized, _ = sources(tmp_path, family, "fp8", one_scale=False)
    (expected,), (found,) = converted(plain, 1, 1), converted(quantized, 1, 1)
    moved = 0
    for name, values in expected.items():
        if found[name].dtype != FP8:
            continue
        result = stands_for(found, name)
        scale = found[f"{name.removesuffix('weight')}weights_scaling_factor"]
        # Three bits behind the point: half a step is 1/16 of the number, and 2^-10 of the scale for the smallest ones.
        step = np.maximum(np.abs(values) / 16, scale.reshape(*scale.shape[:-1], 1, 1) * 2.0**-10)
        assert (np.abs(result - values) <= step * 1.0001).all(), name
        moved += not np.array_equal(result, values)
        linear = stands_for(found, name)
        exact = np.divide(values, scale.reshape(*scale.shape[:-1], 1, 1), dtype=np.float32).astype(FP8)
        assert np.array_equal(linear, exact.astype(np.float32) * scale.reshape(*scale.shape[:-1], 1, 1)), name
    assert moved == (2 if family == "llama" else 4)


def test_global_scales_of_their_own_move_fp4_by_at_most_a_step(tmp_path: Path) -> None:
    plain, quantized, _ = sources(tmp_path, "llama", "nvfp4", one_scale=False)
    (expected,), (found,) = converted(plain, 1, 1), converted(quantized, 1, 1)
    for name, values in expected.items():
        if found[name].dtype != np.uint8:
            continue
        result, prefix = stands_for(found, name), name.removesuffix("weight")
        blocks = (
            found[f"{prefix}weights_scaling_factor"].astype(np.float32) * found[f"{prefix}weights_scaling_factor_2"]
        )
        # A step of 4-bit floats is at most 2 (from 4 to 6), and the block's own scale is rounded to FP8 (1/16).
        bound = np.repeat(blocks, 16, 1) * (1 + 6 / 16)
        assert (np.abs(result - values) <= bound).all(), name
        assert np.abs(result - values).mean() < 0.05 * np.abs(values).mean(), name
