"""Configs as transformers reads them: defaults, windows, tensors, and RoPE frequencies by TensorRT-LLM's formulas."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.families import ModelShape, family_for, family_named

BASE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 99,
}
# By the keys that the family has; what is left out here is transformers' default.
BASES = {
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 99},
    "falcon": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 99},
}
SHORT_AND_LONG = {"short_factor": [1.0 + 0.1 * n for n in range(12)], "long_factor": [2.0 + n for n in range(12)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 5e5, "tie_word_embeddings": True},
    {"model_type": "llama", "max_position_embeddings": 512, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.3}},
    {"model_type": "mistral", "num_key_value_heads": 4},
    {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None},
    {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 16, "head_dim": 16},
    {"model_type": "qwen2", "num_key_value_heads": 4},
    {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 8},
    {"model_type": "qwen2", "num_key_value_heads": 4, **WINDOW, "max_window_layers": 2},
    {"model_type": "qwen2", "num_key_value_heads": 4, **WINDOW, "max_window_layers": 0},
    {"model_type": "qwen2", "num_key_value_heads": 4, **WINDOW},
    {
        "model_type": "qwen2",
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
    },
    {
        "model_type": "qwen3",
        "num_key_value_heads": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.5},
    },
    {"model_type": "qwen3", "num_key_value_heads": 2},
    {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32, **WINDOW, "max_window_layers": 1},
    {"model_type": "gemma", "num_key_value_heads": 1},
    {"model_type": "gemma", "num_key_value_heads": 4, "head_dim": 32, "tie_word_embeddings": False},
    {"model_type": "gemma2"},
    {"model_type": "gemma2", "query_pre_attn_scalar": 144, "head_dim": 32, "sliding_window": 8},
    {"model_type": "gemma2", "head_dim": 32, "layer_types": ["full_attention"] * 4},
    {"model_type": "gemma3_text"},
    {"model_type": "gemma3_text", "head_dim": 32, "sliding_window": 8, "sliding_window_pattern": 3},
    {"model_type": "gemma3_text", "head_dim": 32, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"model_type": "phi3"},
    {"model_type": "phi3", "num_key_value_heads": 4, "sliding_window": 7, "partial_rotary_factor": 0.75},
    {
        "model_type": "phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", **SHORT_AND_LONG},
    },
    {
        "model_type": "phi3",
        "max_position_embeddings": 8192,  # the original length is transformers' default, 4096
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", **SHORT_AND_LONG},
    },
    {"model_type": "gpt2"},
    {"model_type": "gpt2", "n_inner": 512, "n_positions": 64, "scale_attn_weights": False},
    {"model_type": "starcoder2"},
    {"model_type": "starcoder2", "num_key_value_heads": 4, "use_bias": False, "sliding_window": 9},
    {"model_type": "granite"},
    {"model_type": "granite", "num_key_value_heads": 4, "attention_multiplier": 0.015625, "attention_bias": True},
    {"model_type": "falcon"},
    {"model_type": "falcon", "multi_query": False, "bias": True, "parallel_attn": False, "alibi": True},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 512},
    {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
]


def config_of(given: dict[str, Any]) -> dict[str, Any]:
    return BASES.get(given["model_type"], BASE) | given


@pytest.fixture(scope="module")
def answers(reference_python: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [reference_python, Path(__file__).with_name("families_reference.py")],
        input=json.dumps([config_of(config) for config in CONFIGS]),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def shape_of(config: dict[str, Any]) -> ModelShape:
    return family_for(config_of(config)).model_shape(config_of(config))


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_sizes_and_defaults(answers: list[dict[str, Any]], number: int) -> None:
    found, answer = shape_of(CONFIGS[number]), answers[number]
    for key in (
        "head_size",
        "max_position_embeddings",
        "norm_epsilon",
        "rotary_base",
        "tie_word_embeddings",
    ):
        assert getattr(found, key) == answer[key], key
    assert (found.attention_scale or found.head_size**-0.5) == pytest.approx(answer["attention_scale"], rel=1e-12)


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_the_tensors_are_those_of_the_model(answers: list[dict[str, Any]], number: int) -> None:
    """Names and shapes, so also the KV heads, the biases and the norms; transformers lists a tied head as well."""
    shape = shape_of(CONFIGS[number])
    ours = {name: list(spec.shape) for name, spec in family_named(shape.family).tensors(shape).items()}
    assert ours == answers[number]["tensors"]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_window_of_each_layer(answers: list[dict[str, Any]], number: int) -> None:
    found, answer = shape_of(CONFIGS[number]), answers[number]

    def windows(window: int | None, types: Any) -> list[int | None]:
        if types is None:
            return [window] * BASE["num_hidden_layers"]
        return [window if kind == "sliding_attention" else None for kind in types]

    ours = windows(found.sliding_window, found.layer_types)
    assert ours == windows(answer["sliding_window"], answer["layer_types"])


def trtllm_frequencies(shape: ModelShape) -> tuple[np.ndarray[Any, Any], float]:
    """Inverse frequencies and the factor of cos and sin, as TensorRT-LLM's builder computes them."""
    scaling, dim, base = dict(shape.rotary_scaling or {}), shape.head_size, shape.rotary_base
    plain = base ** -(np.arange(0, dim, 2) / dim)
    if scaling["rope_type"] == "linear":
        return plain / scaling["factor"], 1.0
    original = scaling["original_max_position_embeddings"]
    if scaling["rope_type"] == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return (1 - smooth) * plain / scaling["factor"] + smooth * plain, 1.0

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    def mscale(value: float) -> float:
        return 0.1 * value * math.log(scaling["factor"]) + 1

    first = max(math.floor(correction(scaling["beta_fast"])), 0)
    last = min(math.ceil(correction(scaling["beta_slow"])), dim - 1)
    ramp = 1 - np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
    return plain / scaling["factor"] * (1 - ramp) + plain * ramp, mscale(scaling["mscale"]) / mscale(
        scaling["mscale_all_dim"]
    )


def rope_type(config: dict[str, Any]) -> str | None:
    scaling = config.get("rope_scaling", {})
    return scaling.get("rope_type", scaling.get("type"))


LONG = [n for n, config in enumerate(CONFIGS) if rope_type(config) in ("longrope", "su")]
SCALED = [n for n, config in enumerate(CONFIGS) if rope_type(config) and n not in LONG]


@pytest.mark.parametrize("number", LONG)
def test_long_rope_has_two_sets_of_frequencies_and_one_magnitude(answers: list[dict[str, Any]], number: int) -> None:
    shape, answer = shape_of(CONFIGS[number]), answers[number]
    scaling = shape.rotary_scaling or {}
    turned = int(shape.head_size * shape.rotary_pct)
    plain = shape.rotary_base ** -(np.arange(0, turned, 2) / turned)
    np.testing.assert_allclose(plain / np.array(scaling["short_factor"]), answer["frequencies"], rtol=2e-6)
    np.testing.assert_allclose(plain / np.array(scaling["long_factor"]), answer["long_frequencies"], rtol=2e-6)
    assert scaling["attention_factor"] == pytest.approx(answer["attention_factor"], rel=1e-12)


@pytest.mark.parametrize("number", SCALED)
def test_rope_numbers_mean_the_same_in_trtllms_formulas(answers: list[dict[str, Any]], number: int) -> None:
    frequencies, factor = trtllm_frequencies(shape_of(CONFIGS[number]))
    np.testing.assert_allclose(frequencies, answers[number]["frequencies"], rtol=2e-6)
    assert factor == pytest.approx(answers[number]["attention_factor"], rel=1e-9)


@pytest.mark.parametrize("number", SCALED)
def test_the_embedded_engine_turns_as_transformers_does(answers: list[dict[str, Any]], number: int) -> None:
    from lpxbuild.engine.openvino.rope import frequencies

    shape = shape_of(CONFIGS[number])
    scaling = shape.rotary_scaling and {"type": shape.rotary_scaling["rope_type"], **shape.rotary_scaling}
    found, factor = frequencies(shape.head_size, shape.rotary_base, scaling, shape.max_position_embeddings)
    np.testing.assert_allclose(found, answers[number]["frequencies"], rtol=2e-6)
    assert factor == pytest.approx(answers[number]["attention_factor"], rel=1e-9)
