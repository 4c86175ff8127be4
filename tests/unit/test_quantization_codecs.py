"""The arithmetic of formats: bits of torch and ModelOpt for every 16-bit number, and by hand."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.quantization import awq, fp8, int4, int8, nvfp4
from lpxbuild.quantization.magnitude import largest

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def digest(values: np.ndarray) -> str:
    return sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def every(dtype: Any) -> np.ndarray:
    """All numbers of a 16-bit type; 0 in place of NaN."""
    values = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(dtype)
    return np.where(np.isnan(values.astype(np.float32)), dtype(0) if dtype is np.float16 else BFLOAT16.type(0), values)


def matrix() -> np.ndarray:
    """64 × 256 in bfloat16 with a row, groups and blocks of zeros, the same everywhere."""
    numbers = np.arange(64 * 256, dtype=np.float32)
    weight = ((numbers * np.float32(7919)) % np.float32(10007) / np.float32(10007) - np.float32(0.5)).reshape(64, 256)
    weight = weight.astype(BFLOAT16)
    weight[3] = 0
    weight[5, :128] = 0
    assert digest(weight) == "545c1a427057317c9ea6ce78a575b6c33920345b7767db385bbcf595d9c1cace"
    return weight


class TestAgainstTorch:
    """Digests of what torch 2.13 and ModelOpt 0.47 gave for the same numbers."""

    @pytest.mark.parametrize(
        ("dtype", "scale", "expected"),
        [
            (BFLOAT16.type, 1.0, "ec6eecf742e25e847f18e13240011d639b9119d72f5256dcfb380400cfe3eda2"),
            (BFLOAT16.type, 0.037, "fe40a3fca091cdb6c7d2817e8efdea11301b19e62398a33a8d16151740bb592e"),
            (np.float16, 1.0, "e722e731c0e7efd7c94f18855dd4b45429e84ad4ec3f065847f67338d477b5d0"),
            (np.float16, 0.037, "43aa6e9c820415e190809bfa43fdd4e301cd37dbc19e8743b6820b53866e2278"),
        ],
    )
    def test_fp8_of_every_number(self, dtype: Any, scale: float, expected: str) -> None:
        values = every(dtype)
        assert digest(fp8.encode(values, scale)) == expected
        assert digest(np.take(fp8.encode_table(dtype, scale), values.view(np.uint16))) == expected

    @pytest.mark.parametrize(
        ("dtype", "expected"),
        [
            (BFLOAT16.type, "342664dd0319ea86a87bf055d7033f1e133445b096596d01a3b5d77435a0e0d2"),
            (np.float16, "d4ce147c80d7d915adafbcc4036c2a8950cbffe001921e225190671a82590780"),
        ],
    )
    def test_e2m1_of_every_number(self, dtype: Any, expected: str) -> None:
        ones = np.ones((1, (1 << 16) // nvfp4.BLOCK), nvfp4.SCALE_DTYPE)
        packed = nvfp4.encode(every(dtype).reshape(1, -1), ones, np.float32(1))
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
        assert digest(codes) == expected

    def test_a_matrix_in_every_format(self) -> None:
        weight = matrix()
        scales = int8.row_scales(weight)
        assert digest(scales) == "69b0fcd8502f9580d68cb0c11559d41281786d92ae7b1afbde34d0608e7f9df7"
        assert digest(int8.encode(weight, scales)) == "414c7d6df1f7f6a58ea5e10f8330f21d664bade63fe00df35b5f19348ddbbf9d"
        scales = int4.block_scales(weight, 64)
        assert digest(scales) == "0d1e709cb33cd104def9d62eaab658b0a42c6356f829f08ac775a7b4eba6654b"
        packed = int4.pack_rows(int4.encode(weight, scales, 64))
        assert digest(packed) == "9de69c6eb0f3a45abd54b22443a94a661da11732879223991f203cc617b39f25"
        scales = fp8.row_scales(weight)
        assert digest(scales) == "13336afe9de0cdb77c5d0e867022258acb32bf9e921e0dd881f6617fed6b6654"
        encoded = fp8.encode(weight, scales[:, None])
        assert digest(encoded) == "358f364d0659f034db8ad5dcc7f4fd968223c02ef3d75f85abdfc363da41453e"
        whole = nvfp4.global_scale(largest(weight.reshape(-1)))
        assert float(whole) == 0.00018601190822664648
        blocks = nvfp4.block_scales(weight, whole)
        assert digest(blocks) == "36f98941eb8a617841644706219f6c0cd6b1a21b520b7d2ce8a13dae0414e94c"
        codes = nvfp4.encode(weight, blocks, whole)
        assert digest(codes) == "95be08719aefc7baeccd82b454e68e8235010b8f6412507051736228677b3918"


class TestByHand:
    def test_fp8_saturates_and_ties_go_to_even(self) -> None:
        """Neighbours of 17 are 16 and 18: 16 has an even fraction. 464 is halfway to 480, which does not exist."""
        values = np.array([17, 19, 464, 1e9, np.inf, -1e9, np.nan, 2.0**-10, 2.0**-9 * 1.5], np.float32)
        decoded = fp8.decode(fp8.encode(values, 1.0), 1.0)
        np.testing.assert_array_equal(decoded, [16, 20, 448, 448, 448, -448, np.nan, 0, 2.0**-8])

    def test_int4_rows_share_a_byte(self) -> None:
        """Even row low, odd row high: 7 | -8 << 4 = 0x87, -1 | 1 << 4 = 0x1f."""
        rows = np.array([[7, -1], [-8, 1]], np.int8)
        packed = int4.pack_rows(rows)
        assert packed.view(np.uint8).tolist() == [[0x87, 0x1F]]
        np.testing.assert_array_equal(int4.unpack_rows(packed), rows)

    def test_int4_scales_and_rounding(self) -> None:
        """Largest 7 → scale 1; 2.5 goes to 2, -3.5 to -4."""
        weight = np.array([[7, 2.5, -3.5, 0.4], [14, 5, -7, 1]], np.float32)
        scales = int4.block_scales(weight, 4)
        assert scales.tolist() == [[1], [2]]
        codes = int4.encode(weight, scales, 4)
        assert codes.tolist() == [[7, 2, -4, 0], [7, 2, -4, 0]]
        assert int4.decode(codes, scales, 4).tolist() == [[7, 2, -4, 0], [14, 4, -8, 0]]

    def test_nvfp4_codes(self) -> None:
        """Scale 1 in all: halfway goes to the even code; -0.1 keeps its sign, zero has none; 100 becomes 6."""
        values = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -5, -0.1, -0.0, 100, 0, 6, -6, 0.5, 1.5]], np.float32)
        packed = nvfp4.encode(values, np.ones((1, 1), nvfp4.SCALE_DTYPE), 1.0)
        decoded = nvfp4.decode(packed, np.ones((1, 1), nvfp4.SCALE_DTYPE), 1.0)
        assert decoded[0].tolist() == [0, 1, 1, 2, 2, 4, 4, -4, 0, 0, 6, 0, 6, -6, 0.5, 1.5]
        assert (packed[0] >> 4 & 15).tolist()[4] == 0  # -0.0 is plain zero
        assert packed[0, 4] & 15 == 8  # -0.1 is minus zero

    def test_a_stack_has_a_scale_for_each_matrix(self) -> None:
        weight = np.stack([matrix(), matrix() * BFLOAT16.type(4)])
        whole = nvfp4.global_scale(largest(weight.reshape(2, -1)))
        blocks = nvfp4.block_scales(weight, whole)
        codes = nvfp4.encode(weight, blocks, whole)
        np.testing.assert_array_equal(codes[0], codes[1])
        np.testing.assert_array_equal(4 * nvfp4.decode(codes, blocks, whole)[0], nvfp4.decode(codes, blocks, whole)[1])

    def test_factors_are_divided_out_and_in(self) -> None:
        weight = np.array([[1, 3]], np.float32).astype(BFLOAT16)
        factors = np.array([2, 0.5], np.float32)
        smoothed = awq.smooth(weight, factors)
        assert smoothed.astype(np.float32).tolist() == [[0.5, 6]]
        moved = awq.move(smoothed, factors, np.array([1, 1], np.float32))
        assert moved.astype(np.float32).tolist() == [[1, 3]]
        assert awq.unsmooth(smoothed.astype(np.float32), factors).tolist() == [[1, 3]]
        mean = awq.merged_scale([np.array([1, 2], np.float32), np.array([2, 4], np.float32)])
        assert mean.tolist() == [1.5, 3]

    @pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32])
    @pytest.mark.parametrize("size", [16, 64])
    def test_largest_magnitudes(self, dtype: Any, size: int) -> None:
        values = np.random.default_rng(0).standard_normal((7, size)).astype(dtype)
        np.testing.assert_array_equal(largest(values), np.abs(values.astype(np.float32)).max(axis=1))
        values[2, 3] = np.nan
        assert np.isnan(largest(values)[2])
