"""int8_wo, int4_wo and `fast` through Triton, against the float32 computation of the weights dequantized by hand.

TensorRT-LLM's rule for weight-only: scale = max|w| / 2^(bits-1) per output row of what one rank holds, rounded half
away from zero, clamped; the kernel multiplies with the scale rounded to bfloat16. `fast`: int8 per output row, /127.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_model
from safetensors.numpy import load_file, save_file
from test_greedy_parity import Served

from lpxbuild.server import ServerSettings, SupervisorSettings, start

PROMPT = [5, 17, 102, 33, 250, 41, 9, 77, 160, 12]
TENSOR = 2
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def as_bfloat16(values: Any) -> Any:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def weight_only(bits: int) -> Callable[[str, Any], Any]:
    limit = 2 ** (bits - 1)

    def one_rank(weight: Any) -> Any:
        scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(limit)
        ratio = weight / scale
        rounded = np.sign(ratio) * np.floor(np.abs(ratio) + np.float32(0.5))
        return np.clip(rounded, -limit, limit - 1).astype(np.float32) * as_bfloat16(scale)

    def rule(name: str, values: Any) -> Any:
        values = as_bfloat16(values)
        if "_proj.weight" not in name:
            return values
        pieces = np.split(values, TENSOR, axis=1) if name.endswith(ROW_PARALLEL) else [values]
        return np.concatenate([one_rank(piece) for piece in pieces], axis=1)

    return rule


def per_channel(_name: str, values: Any) -> Any:
    if values.ndim == 1:
        return values
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(values / scale).astype(np.float32) * scale


def dequantized(source: Path, target: Path, rule: Callable[[str, Any], Any]) -> Path:
    """A copy of the model whose tensors are `rule(name, values)`."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    save_file({name: rule(name, values) for name, values in tensors.items()}, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.make_source(tmp_path_factory.mktemp("quantized") / "source", hidden_size=128, head_dim=32)


@pytest.fixture(scope="module")
def served(source: Path, tmp_path_factory: pytest.TempPathFactory):
    """One server; the engine behind it is exchanged."""
    place = tmp_path_factory.mktemp("served")
    repository = tiny_model.build_repository(tiny_model.build_engine(source, place / "first"), place / "repository")
    settings = ServerSettings(supervisor=SupervisorSettings(poll=0.05, most_repairs=100))
    with start(repository, log_path=place / "triton.log", settings=settings) as server:
        yield Served(server, repository)


def answers(served: Served, engine: Path) -> tuple[list[int], Any]:
    served.exchange(engine)
    tokens, log_probs = served.greedy(PROMPT)
    assert len(tokens) == 32
    return tokens, np.array(log_probs)


@pytest.mark.parametrize("bits", [8, 4])
def test_weight_only_makes_the_tokens_of_the_dequantized_weights(served, source, tmp_path, bits):
    rule = weight_only(bits)
    plain = tiny_model.build_engine(dequantized(source, tmp_path / "model", rule), tmp_path / "plain")
    quantized = tiny_model.build_engine(
        source, tmp_path / "built", tensor=TENSOR, dtype="bfloat16", quantization=f"int{bits}_wo"
    )
    expected, expected_log_probs = answers(served, plain)
    tokens, log_probs = answers(served, quantized)
    assert tokens == expected
    assert np.abs(log_probs - expected_log_probs).max() <= 1e-3
    # The weights as they were answer otherwise: the comparison above can fail.
    original, original_log_probs = answers(served, tiny_model.build_engine(source, tmp_path / "original"))
    assert original != expected or np.abs(original_log_probs - expected_log_probs).max() > 1e-3


def test_fast_is_near_the_weights_in_int8(served, source, tmp_path):
    """Activations and KV cache are quantized too where the CPU can: near, not equal."""
    plain = tiny_model.build_engine(dequantized(source, tmp_path / "model", per_channel), tmp_path / "plain")
    fast = tiny_model.build_engine(source, tmp_path / "built", runtime=tiny_model.Runtime(precision="fast"))
    expected, expected_log_probs = answers(served, plain)
    tokens, log_probs = answers(served, fast)
    same = next((at for at, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1]), len(tokens))
    assert same > 0
    assert np.abs(log_probs[:same] - expected_log_probs[:same]).max() < 0.2
