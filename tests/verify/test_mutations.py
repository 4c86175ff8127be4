"""Conversion errors planted into real checkpoints: each must fail, and the wrong module must be the first one named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planting import Planted, layer

from lpxbuild.quantization.calibrated import Calibration

# Over 20 s because the reference environment imports torch once per model; a planted error takes about a second.
pytestmark = pytest.mark.slow

Plant = Callable[[Planted], None]
HEAD, HEADS, KV_HEADS, RANKS = 16, 8, 4, 2  # of the tiny llama
Q, K = HEADS * HEAD // RANKS, KV_HEADS * HEAD // RANKS
LLAMA = ("llama_biases_rope_llama3", {"tensor": RANKS})


def rows(begin: int, end: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change some rows, leave the others."""

    def changed(tensor: Any) -> Any:
        tensor[begin:end] = change(tensor[begin:end].copy())
        return tensor

    return changed


def interleaved(q: Any) -> Any:
    """The other order of rotary dimensions: (2, n) pairs instead of (n, 2)."""
    return q.reshape(-1, 2, HEAD // 2, q.shape[-1]).transpose(0, 2, 1, 3).reshape(q.shape)


def q_for_k(tensor: Any) -> Any:
    tensor[[*range(K), *range(Q, Q + K)]] = tensor[[*range(Q, Q + K), *range(K)]]
    return tensor


def layers_exchanged(planted: Planted) -> None:
    names = [name for name in planted.tensors(0)[1] if name.startswith("transformer.layers.1.")]
    for name in names:
        planted.swap(name, name.replace(".1.", ".2."))


def fc_for_gate(planted: Planted) -> None:
    for kind in ("weight", "bias"):
        planted.swap(layer(1, f"mlp.fc.{kind}"), layer(1, f"mlp.gate.{kind}"))


def halves(tensor: Any) -> Any:
    return np.roll(tensor, len(tensor) // 2, axis=0)


def nibbles(packed: Any) -> Any:
    bits = packed.view(np.uint8)
    return ((bits >> 4) | (bits << 4)).view(np.int8)


def experts(tensor: Any) -> Any:
    return tensor[[1, 0, *range(2, len(tensor))]]


def qkv(number: int, begin: int, end: int, change: Callable[[Any], Any]) -> Plant:
    return lambda planted: planted.set(layer(number, "attention.qkv.weight"), rows(begin, end, change))


def one(name: str, change: Callable[[Any], Any]) -> Plant:
    return lambda planted: planted.set(name, change)


MUTATIONS: dict[str, tuple[tuple[str, dict[str, Any]], Plant, str]] = {
    "gate and up projection swapped": (LLAMA, fc_for_gate, "layers.1.mlp.fc"),
    "rows of q in the other rotary order": (LLAMA, qkv(2, 0, Q, interleaved), "layers.2.attention.qkv (q)"),
    "rows of k in the other rotary order": (LLAMA, qkv(2, Q, Q + K, interleaved), "layers.2.attention.qkv (k)"),
    "q and k swapped": (LLAMA, qkv(0, 0, Q + K, q_for_k), "layers.0.attention.qkv (q)"),
    "k and v swapped": (LLAMA, qkv(3, Q, Q + 2 * K, halves), "layers.3.attention.qkv (k)"),
    "one KV head wrong": (LLAMA, qkv(0, Q, Q + 2 * HEAD, lambda k: np.concatenate([k[:HEAD]] * 2)), "(k)"),
    "heads of v shifted by one": (
        LLAMA,
        qkv(1, Q + K, Q + 2 * K, lambda v: np.roll(v, HEAD, 0)),
        "1.attention.qkv (v)",
    ),
    "bias of qkv dropped": (LLAMA, one(layer(1, "attention.qkv.bias"), np.zeros_like), "layers.1.attention.qkv (q)"),
    "bias of qkv from the other rank": (
        LLAMA,
        lambda planted: planted.exchange_ranks(layer(2, "attention.qkv.bias")),
        "layers.2.attention.qkv (q)",
    ),
    "bias of a row-parallel layer added by every rank": (
        LLAMA,
        one(layer(2, "attention.dense.bias"), lambda bias: 2 * bias),
        "layers.2.attention.dense",
    ),
    "another RoPE base": (LLAMA, lambda p: p.config(rotary_base=500000.0), "layers.0.attention (positions"),
    "RoPE scaling dropped": (LLAMA, lambda p: p.config(rotary_scaling=None), "layers.0.attention (positions"),
    "another norm epsilon": (LLAMA, lambda p: p.config(norm_epsilon=1e-3), "layers.0.input_layernorm"),
    "one layer's weight 5 % too large": (
        LLAMA,
        one(layer(3, "attention.dense.weight"), lambda weight: weight * np.float32(1.05)),
        "layers.3.attention.dense",
    ),
    "rank files exchanged": (LLAMA, lambda p: p.exchange_ranks(), "vocab_embedding"),
    "columns of dense shifted by a head": (
        LLAMA,
        one(layer(0, "attention.dense.weight"), lambda weight: np.roll(weight, HEAD, 1)),
        "layers.0.attention.dense",
    ),
    "columns of proj from the other rank": (
        LLAMA,
        lambda planted: planted.exchange_ranks(layer(1, "mlp.proj.weight")),
        "layers.1.mlp.proj",
    ),
    "rows of the embedding shifted by one": (
        LLAMA,
        one("transformer.vocab_embedding.weight", lambda table: np.roll(table, 1, 0)),
        "vocab_embedding",
    ),
    "rows of the head shifted by one": (LLAMA, one("lm_head.weight", lambda head: np.roll(head, 1, 0)), "lm_head"),
    "two layers exchanged": (LLAMA, layers_exchanged, "layers.1.input_layernorm"),
    "norms before and after attention swapped": (
        LLAMA,
        lambda p: p.swap(layer(0, "input_layernorm.weight"), layer(0, "post_layernorm.weight")),
        "layers.0.input_layernorm",
    ),
    "last norm dropped": (LLAMA, one("transformer.ln_f.weight", np.ones_like), "ln_f"),
    "square matrix transposed": (
        ("llama", {}),
        one(layer(1, "attention.dense.weight"), np.transpose),
        "1.attention.dense",
    ),
    "sliding window dropped": (("mistral", {}), lambda p: p.own(sliding_window=None), "layers.0.attention (positions"),
    "norms of q and k swapped": (
        ("qwen3", {}),
        lambda p: p.swap(layer(1, "attention.q_layernorm.weight"), layer(1, "attention.k_layernorm.weight")),
        "layers.1.attention (positions",
    ),
    "norm without its 1": (
        ("gemma", {}),
        one(layer(2, "input_layernorm.weight"), lambda weight: weight - 1),
        "layers.2.input_layernorm",
    ),
    "soft-cap of scores dropped": (
        ("gemma2", {}),
        lambda p: p.config(attn_logit_softcapping=None),
        "layers.0.attention (positions",
    ),
    "soft-cap of logits dropped": (("gemma2", {}), lambda p: p.config(final_logit_softcapping=None), "lm_head"),
    "halves of a fused MLP swapped": (("phi3", {}), one(layer(0, "mlp.fc.weight"), halves), "layers.0.mlp.fc"),
    "positions shifted by one": (
        ("gpt2", {}),
        one("transformer.position_embedding.weight", lambda table: np.roll(table, 1, 0)),
        "vocab_embedding",
    ),
    "two experts exchanged": (("mixtral", {}), one(layer(1, "mlp.fc.weight"), experts), "layers.1.mlp (experts)"),
    "two rows of a router swapped": (
        ("mixtral", {}),
        one(layer(2, "mlp.router.weight"), experts),
        "layers.2.mlp.router",
    ),
    "shared expert's gate dropped": (
        ("qwen2_moe", {}),
        one(layer(0, "mlp.shared_expert_gate.weight"), np.zeros_like),
        "layers.0.mlp (experts)",
    ),
    "order of nibbles": (
        ("llama", {"scheme": "int4_rtn"}),
        one(layer(2, "mlp.gate.weight"), nibbles),
        "layers.2.mlp.gate",
    ),
    "a layer's channel scales 5 % too large": (
        ("llama", {"scheme": "fp8_pc_pt"}),
        one(layer(1, "mlp.proj.per_channel_scale"), lambda scale: scale * np.float32(1.05)),
        "layers.1.mlp.proj",
    ),
    "factors of the input not applied": (
        ("llama", {"scheme": "int4_awq"}),
        one(layer(3, "attention.qkv.prequant_scaling_factor"), np.ones_like),
        "layers.3.attention.qkv",  # one factor for q, k and v; which of them is named first depends on the noise
    ),
    "k and v swapped under SmoothQuant": (
        ("llama", {"scheme": "int8_sq"}),
        one(layer(1, "attention.qkv.weight"), rows(2 * Q, 2 * Q + 4 * K, halves)),
        "layers.1.attention.qkv (k)",
    ),
}
EVERYDAY = {
    "gate and up projection swapped",
    "one KV head wrong",
    "another RoPE base",
    "one layer's weight 5 % too large",
    "rank files exchanged",
}


def calibration_of(folder: Path) -> Calibration:
    """Factors of the input that are not 1; layers with the same input share them."""
    from safetensors.numpy import load_file

    random = np.random.default_rng(4)
    numbers: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            continue
        module = name.removesuffix(".weight")
        group = module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        if group not in shared:
            shared[group] = np.exp(random.normal(0, 0.3, weight.shape[1])).astype(np.float32)
        numbers[f"{module}.input_quantizer._pre_quant_scale"] = shared[group]
        numbers[f"{module}.input_quantizer._amax"] = np.float32(4)
    return Calibration(numbers)


def sound_build(built: Any, speaking_models: Any, name: str, options: dict[str, Any]) -> Any:
    if options.get("scheme") in ("int4_awq", "int8_sq", "fp8", "nvfp4", "w4a8_awq"):
        options = {**options, "calibration": calibration_of(speaking_models(name))}
    if "scheme" in options:
        options = {"dtype": "bfloat16", **options}
    return built(name, **options)


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.full) for name in MUTATIONS]
)
def test_planted_error_fails_and_is_named(
    name: str, built: Any, planted: Any, compare: Any, speaking_models: Any, tmp_path: Path
) -> None:
    (model, options), error, module = MUTATIONS[name]
    sound = sound_build(built, speaking_models, model, options)
    verdict = compare(planted(sound, error), tmp_path)
    assert verdict.status == "fail"
    assert module in verdict.wrong[0].name, [f"{each.name}: {each.why}" for each in verdict.wrong[:4]]
    assert verdict.wrong[0].name in verdict.summary()


@pytest.mark.full
def test_a_scale_5_percent_off_is_only_a_warning_under_smoothquant(
    built: Any, planted: Any, compare: Any, speaking_models: Any, tmp_path: Path
) -> None:
    """What this format loses by itself differs too much between modules: the module is named, the build not failed."""
    sound = sound_build(built, speaking_models, "llama", {"scheme": "int8_sq"})
    error = one(layer(2, "attention.dense.weights_scaling_factor"), lambda scale: scale * np.float32(1.05))
    verdict = compare(planted(sound, error), tmp_path)
    assert verdict.status == "warn"
    assert "layers.2.attention.dense" in next(module.name for module in verdict.modules if module.lossy)


def test_there_are_twenty_and_more() -> None:
    assert len(MUTATIONS) >= 20


CONTROLS = [
    LLAMA,
    *((name, {}) for name in ("llama", "mistral", "qwen2", "qwen2_mixed_layers", "qwen3", "llama_tied_rope_yarn")),
    *((name, {}) for name in ("gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "starcoder2", "granite")),
    *((name, {}) for name in ("falcon", "falcon_new", "falcon_rw", "mixtral", "qwen2_moe", "qwen3_moe")),
    *(("llama", {"scheme": name}) for name in ("int8_wo", "int4_wo", "int4_rtn", "int4_awq", "fp8_pc_pt")),
    *(("llama", {"scheme": name}) for name in ("int8_sq", "fp8", "nvfp4", "w4a16_nvfp4")),
    ("llama", {"dtype": "float16"}),
    ("qwen2", {"tensor": 2, "pipeline": 2}),
]


@pytest.mark.parametrize(
    "control",
    [control if control == LLAMA else pytest.param(control, marks=pytest.mark.full) for control in CONTROLS],
    ids=lambda control: "-".join([control[0], *map(str, control[1].values())]),
)
def test_a_sound_build_is_not_accused(
    control: Any, built: Any, compare: Any, speaking_models: Any, tmp_path: Path
) -> None:
    """No module is wrong, and nothing fails. Random models have near ties everywhere, which is only a warning."""
    verdict = compare(sound_build(built, speaking_models, *control), tmp_path)
    assert verdict.ok, verdict.reasons
    assert not verdict.wrong
    if "scheme" not in control[1] and "dtype" not in control[1]:
        assert verdict.status == "pass", verdict.reasons


@pytest.mark.full
def test_a_backend_without_engine_here_is_compared_by_one_of_its_checkpoint(
    built: Any, compare: Any, tmp_path: Path
) -> None:
    """What a checkpoint for TensorRT-LLM is compared by, through the real children."""
    verdict = compare(replace(built("qwen2", 2, 2), engine=None), tmp_path, really=True)
    assert verdict.status == "pass", verdict.reasons
    assert len(verdict.modules) == 2 + 1 + 4 * 12
