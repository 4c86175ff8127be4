"""Casts between element types, and what is said when a number becomes infinite."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.cast import Overflow, cast
from lpxbuild.output import Output

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import NAMES, TYPES, checked, config_for, hf_tensors, read_safetensors, write_source

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ALL_16_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Bits of round-to-nearest-even of finite and infinite float32, by integer arithmetic."""
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bits_of(source: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    target = np.empty(source.shape, dtype)
    cast(source, target)
    return target.view({2: np.uint16, 4: np.uint32}[target.dtype.itemsize])


class TestBits:
    def test_every_bfloat16_to_float16(self) -> None:
        values = from_bfloat16(ALL_16_BITS)
        with np.errstate(over="ignore"):
            expected = values.astype(np.float16)
        found = bits_of(ALL_16_BITS.view(BFLOAT16), np.float16).view(np.float16)
        np.testing.assert_array_equal(found, expected)  # NaN equals NaN here
        np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))

    def test_every_float16_to_bfloat16(self) -> None:
        values = ALL_16_BITS.view(np.float16).astype(np.float32)
        number = ~np.isnan(values)
        found = bits_of(ALL_16_BITS.view(np.float16), BFLOAT16)
        np.testing.assert_array_equal(found[number], to_bfloat16(values)[number])
        assert np.isnan(from_bfloat16(found[~number])).all()

    def test_every_16_bit_number_to_float32(self) -> None:
        found = bits_of(ALL_16_BITS.view(BFLOAT16), np.float32)
        number = ~np.isnan(from_bfloat16(ALL_16_BITS))
        np.testing.assert_array_equal(found[number], (ALL_16_BITS.astype(np.uint32) << 16)[number])

    def test_float32_to_bfloat16(self) -> None:
        """Random patterns, and ties in both directions: 1 + 2^-8 goes down to even, 1 + 3·2^-8 goes up."""
        random = np.random.default_rng(0).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
        values = random.view(np.float32)
        values = np.concatenate([values[~np.isnan(values)], np.float32([1 + 2**-8, 1 + 3 * 2**-8])])
        found = bits_of(values, BFLOAT16)
        np.testing.assert_array_equal(found, to_bfloat16(values))
        assert from_bfloat16(found[-2:]).tolist() == [1.0, 1 + 2**-6]

    def test_float32_to_float16_rounds_once(self) -> None:
        """Twice rounded (by way of bfloat16) 1 + 2^-11 + 2^-20 would give 1; the nearest float16 is 1 + 2^-10."""
        assert bits_of(np.float32([1 + 2**-11 + 2**-20]), np.float16).view(np.float16).tolist() == [1 + 2**-10]


class TestOverflow:
    @pytest.mark.parametrize("kind", ["BF16", "F32"])
    def test_float16_ends_at_65504(self, kind: str) -> None:
        """65280 is the last bfloat16 below the limit, 65536 the first above."""
        source = np.array([1.0, 65280.0, 65536.0, -1e30, np.inf, np.nan], np.float32).astype(TYPES[kind])
        target = np.empty(source.shape, np.float16)
        found = cast(source, target)
        assert found is not None
        assert found.count == 2
        assert found.largest == pytest.approx(1e30, rel=0.01)
        assert target[:2].tolist() == [1.0, 65280.0]
        assert np.isinf(target[2:5]).all()

    def test_float32_rounds_to_infinity_from_65520_on(self) -> None:
        values = np.array([65519.0, 65520.0], np.float32)
        target = np.empty(2, np.float16)
        assert cast(values, target) == Overflow(1, 65520.0)
        assert target.tolist() == [65504.0, np.inf]

    def test_bfloat16_holds_float16_and_nearly_all_of_float32(self) -> None:
        target = np.empty(2, BFLOAT16)
        assert cast(np.array([65504, -65504], np.float16), target) is None
        largest = float(np.finfo(np.float32).max)
        assert cast(np.array([3.38e38, largest], np.float32), target) == Overflow(1, largest)

    def test_infinities_and_nan_of_the_source_are_no_overflow(self) -> None:
        for kind in ("BF16", "F32"):
            source = np.array([np.inf, -np.inf, np.nan, 1], np.float32).astype(TYPES[kind])
            assert cast(source, np.empty(4, np.float16)) is None


@pytest.mark.parametrize("target", list(NAMES))
@pytest.mark.parametrize("source", list(NAMES))
def test_whole_models_of_every_type(tmp_path: Path, source: str, target: str) -> None:
    config = config_for(num_hidden_layers=1, torch_dtype=source)
    tensors = {name: values.astype(TYPES[NAMES[source]]) for name, values in hf_tensors(config).items()}
    output = Output.quiet()
    folder = write_source(tmp_path / "source", config, tensors)
    report = convert(checked(folder), tmp_path / "out", dtype=target, output=output)
    found = read_safetensors(tmp_path / "out/rank0.safetensors")
    for ours, theirs in (
        ("lm_head", "lm_head"),
        ("transformer.layers.0.mlp.proj", "model.layers.0.mlp.down_proj"),
    ):
        values = found[f"{ours}.weight"]
        assert values.dtype == TYPES[NAMES[target]]
        exact = tensors[f"{theirs}.weight"].astype(np.float32)
        if target == "bfloat16":
            np.testing.assert_array_equal(values.view(np.uint16), to_bfloat16(exact))
        else:
            np.testing.assert_array_equal(values, exact.astype(values.dtype))
    assert report.casts == ({} if source == target else {NAMES[source]: len(tensors)})
    assert output.notices == []


@pytest.mark.parametrize("workers", [1, 3])
def test_overflow_is_said_with_tensor_count_and_remedy(tmp_path: Path, workers: int) -> None:
    config = config_for(num_hidden_layers=2, torch_dtype="bfloat16")
    tensors = hf_tensors(config)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 50] = -131072.0  # a column of rank 1
    tensors["model.layers.1.mlp.down_proj.weight"][9, 50] = 70000.0
    tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] = 70000.0
    source = {name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    output = Output.quiet()
    folder = write_source(tmp_path / "source", config, source)
    report = convert(
        checked(folder), tmp_path / "out", dtype="float16", tensor_parallel=2, workers=workers, output=output
    )
    assert [(item.rank, item.tensor, item.count, item.largest) for item in report.overflows] == [
        (0, "transformer.layers.0.attention.qkv.weight", 1, 70144.0),  # the nearest bfloat16 of 70000
        (1, "transformer.layers.1.mlp.proj.weight", 2, 131072.0),
    ]
    (notice,) = output.notices
    for word in ("3 number(s)", "2 tensor(s)", "float16", "131072", "mlp.proj.weight of rank 1", "bfloat16"):
        assert word in notice
    found = read_safetensors(tmp_path / "out/rank1.safetensors")["transformer.layers.1.mlp.proj.weight"]
    assert np.isinf(found).sum() == 2
