"""Every stored form of a linear's weight, made here by the layout's description, against a product in numpy.

The layouts: TensorRT-LLM's W4A16_AWQ packs two output rows in a byte (even row low) with a float32 scale per group of
input features; NVFP4 two input features (even one low) with an e4m3 scale per 16 and one float32 over all;
SmoothQuant int8 and FP8 rowwise have a scale per output row, FP8 one in all; W8A16 and W4A16 plain weights, which each
rank rounds by itself. A prequant factor multiplies the activations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lpxbuild.engine.openvino  # noqa: F401  before openvino: switches its telemetry off
from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.linears import Linears
from lpxbuild.engine.openvino.weights import Matrix, MergedWeights
from lpxbuild.families.shape import ModelShape

HIDDEN, HEADS, HEAD, INNER, EXPERTS, GROUP = 128, 4, 32, 256, 2, 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
PREFIX = "transformer.layers.0."


def tiny_shape() -> ModelShape:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": 8, "max_position_embeddings": 64}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_size": HEAD, "num_hidden_layers": 1}
    rest = {"norm_epsilon": 1e-5, "hidden_act": "silu", "rotary_base": 1e4, "rotary_scaling": None}
    names = {"family": "llama", "architecture": "LlamaForCausalLM", "tie_word_embeddings": False, "dtype": "bfloat16"}
    return ModelShape(**sizes, **heads, **rest, **names)  # type: ignore[arg-type]


class Stored:
    """One format: random tensors of a whole matrix, and the matrix that they mean."""

    def __init__(self, name: str, out: int, in_: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.rows: dict[str, Any] = {}  # split with the rows, packed two in one where `packed_rows`
        self.columns: dict[str, Any] = {}  # split with the columns
        self.both: dict[str, Any] = {}
        self.single: dict[str, Any] = {}
        self.packed_rows = False
        integers = random.integers
        if name == "none":
            self.both["weight"] = random.normal(size=(out, in_)).astype(ml_dtypes.bfloat16)
            self.effective = self.both["weight"].astype(np.float32)
        elif name in ("int4_rtn", "int4_awq", "w4a8_awq"):
            self.packed_rows = True
            codes = integers(-8, 8, (out, in_))
            nibbles = (codes & 15).astype(np.uint8)
            self.both["weight"] = (nibbles[0::2] | (nibbles[1::2] << 4)).view(np.int8)
            scales = random.uniform(0.01, 0.1, (out, in_ // GROUP)).astype(np.float32)
            self.both["weights_scaling_factor"] = scales
            self.effective = codes.astype(np.float32) * np.repeat(scales, GROUP, 1)
        elif name == "nvfp4":
            codes = integers(0, 16, (out, in_)).astype(np.uint8)
            self.both["weight"] = codes[:, 0::2] | (codes[:, 1::2] << 4)
            scales = random.uniform(1, 400, (out, in_ // 16)).astype(ml_dtypes.float8_e4m3fn)
            self.both["weights_scaling_factor"] = scales
            self.single["weights_scaling_factor_2"] = np.array([0.00037], np.float32)
            values = np.where(codes >= 8, -1, 1) * E2M1[codes & 7]
            self.effective = values * np.repeat(scales.astype(np.float32), 16, 1) * np.float32(0.00037)
        elif name == "int8_sq":
            self.both["weight"] = integers(-127, 128, (out, in_)).astype(np.int8)
            self.rows["weights_scaling_factor"] = random.uniform(0.001, 0.01, out).astype(np.float32)
            self.effective = self.both["weight"] * self.rows["weights_scaling_factor"][:, None]
        else:
            values = random.normal(0, 50, (out, in_)).astype(ml_dtypes.float8_e4m3fn)
            self.both["weight"] = values
            if name == "fp8":
                self.single["weights_scaling_factor"] = np.array([0.0123], np.float32)
                self.effective = values.astype(np.float32) * np.float32(0.0123)
            else:
                self.rows["per_channel_scale"] = random.uniform(0.001, 0.01, out).astype(np.float32)
                self.effective = values.astype(np.float32) * self.rows["per_channel_scale"][:, None]
        if name in ("int4_awq", "w4a8_awq", "int8_sq"):
            self.columns["prequant_scaling_factor"] = random.uniform(0.5, 2, in_).astype(ml_dtypes.bfloat16)
            self.effective = self.effective * self.columns["prequant_scaling_factor"].astype(np.float32)

    def part(self, rank: int, ranks: int, *, by_columns: bool) -> dict[str, Any]:
        """What a rank's file holds."""

        def cut(array: Any, axis: int) -> Any:
            return np.ascontiguousarray(np.split(array, ranks, axis)[rank])

        if by_columns:
            split = {name: cut(array, 1) for name, array in self.both.items()}
            return {
                **split,
                **self.rows,
                **{name: cut(array, 0) for name, array in self.columns.items()},
                **self.single,
            }
        split = {name: cut(array, 0) for name, array in (self.both | self.rows).items()}
        return {**split, **self.columns, **self.single}


class Ranks:
    """Rank files in memory."""

    def __init__(self, form: str, tensors: list[dict[str, Any]]) -> None:
        self.form = form
        self.tensors = tensors
        self.shape = tiny_shape()
        self.config = {"mapping": {"tp_size": len(tensors), "pp_size": 1}}

    def tensor(self, name: str, rank: int) -> Any:
        return self.tensors[rank][name]

    def names(self, rank: int) -> frozenset[str]:
        return frozenset(self.tensors[rank])

    def format_of(self, name: str) -> str:
        return self.form

    def weight_rows(self, name: str, rank: int, begin: int, end: int) -> Any:
        raise AssertionError("a form that the graph keeps needs no dequantized rows")


def product(ranks: Ranks, pick: Any, features: int, scratch: Path) -> tuple[Any, Any, Linears]:
    """(activations, activations · weightᵀ as the CPU computes it, the maker)."""
    import openvino as ov
    from openvino import opset13 as op

    weights = MergedWeights(ranks, scratch)
    linears = Linears(weights, Constants(weights), int8=False)
    hidden = op.parameter(ov.PartialShape([1, -1, features]), ov.Type.f32)
    matrix: Matrix = pick(weights)
    model = ov.Model([linears.apply(hidden, matrix)], [hidden])
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    given = np.random.default_rng(1).normal(size=(1, 5, features)).astype(np.float32)
    ov.save_model(model, scratch / "model.xml", compress_to_fp16=False)
    return given[0], ov.Core().compile_model(scratch / "model.xml", "CPU", exact)([given])[0][0], linears


def assert_product(found: Any, given: Any, weight: Any) -> None:
    expected = given.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()


FORMS = ["none", "int4_rtn", "int4_awq", "w4a8_awq", "int8_sq", "fp8", "fp8_pc_pt", "nvfp4"]


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_rows_split_over_ranks(form: str, tensor: int, tmp_path: Path) -> None:
    """mlp.fc: every rank has rows of its own, and their scales."""
    stored = Stored(form, INNER, HIDDEN)
    parts = [stored.part(rank, tensor, by_columns=False) for rank in range(tensor)]
    ranks = Ranks(form, [{f"{PREFIX}mlp.fc.{name}": array for name, array in part.items()} for part in parts])
    given, found, linears = product(ranks, lambda w: w.column_parallel(0, "mlp.fc", INNER), HIDDEN, tmp_path)
    assert_product(found, given, stored.effective)
    assert list(linears.forms) == [form]
    size = (tmp_path / "model.bin").stat().st_size
    bits = {"none": 16, "int8_sq": 8, "fp8": 8, "fp8_pc_pt": 8, "nvfp4": 4 + 32 / 16}.get(form, 4 + 32 / GROUP)
    assert size < (bits / 8) * INNER * HIDDEN + 4 * INNER + 1500, "kept in its bits"


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_columns_split_over_ranks(form: str, tensor: int, tmp_path: Path) -> None:
    """mlp.proj: the ranks' columns lie side by side under one scale per row, and each brings its prequant factors."""
    stored = Stored(form, HIDDEN, INNER)
    parts = [stored.part(rank, tensor, by_columns=True) for rank in range(tensor)]
    ranks = Ranks(form, [{f"{PREFIX}mlp.proj.{name}": array for name, array in part.items()} for part in parts])
    given, found, _ = product(ranks, lambda w: w.row_parallel(0, "mlp.proj", INNER), INNER, tmp_path)
    assert_product(found, given, stored.effective)


@pytest.mark.parametrize("form", FORMS)
def test_query_key_value_of_two_ranks(form: str, tmp_path: Path) -> None:
    """[Q_r; K; V] with one KV head, which both ranks hold: rank 1's copy is left out."""
    query, key_value = Stored(form, HEADS * HEAD, HIDDEN, 1), Stored(form, 2 * HEAD, HIDDEN, 2)
    own = key_value.columns.get("prequant_scaling_factor")
    # One scale over all means the same one in both halves; prequant factors are shared by the three.
    key_value.columns, key_value.single = query.columns, query.single
    files = []
    for rank in range(2):
        part = query.part(rank, 2, by_columns=False)
        for name, array in (key_value.both | key_value.rows).items():
            part[name] = np.concatenate([part[name], array])
        files.append({f"{PREFIX}attention.qkv.{name}": array for name, array in part.items()})
    effective = key_value.effective
    if own is not None:
        effective = effective / own.astype(np.float32) * query.columns["prequant_scaling_factor"].astype(np.float32)
    for index, expected in enumerate((query.effective, effective[:HEAD], effective[HEAD:])):
        given, found, _ = product(Ranks(form, files), lambda w, i=index: w.qkv(0)[i], HIDDEN, tmp_path)
        assert_product(found, given, expected)


@pytest.mark.parametrize("form", ["none", "int4_awq", "fp8", "int8_sq"])
def test_experts_lie_one_below_the_other(form: str, tmp_path: Path) -> None:
    """Two experts' fused [up_r; gate_r] at two ranks, each expert with a scale of its own where it has one."""
    size = INNER // 2
    stored = [[Stored(form, size, HIDDEN, 2 * expert + half) for half in range(2)] for expert in range(EXPERTS)]
    for half in (half for halves in stored for half in halves):
        if half.columns:  # both halves of both experts read the same activations
            own = half.columns["prequant_scaling_factor"].astype(np.float32)
            half.columns = stored[0][0].columns
            half.effective = half.effective / own * half.columns["prequant_scaling_factor"].astype(np.float32)
    files = []
    for rank in range(2):
        parts = [[half.part(rank, 2, by_columns=False) for half in halves] for halves in stored]
        names = parts[0][0]
        file = {}
        for name in names:
            if name in stored[0][0].single:
                array = np.array([[0.0123], [0.05]], np.float32)
            elif name in stored[0][0].columns:
                array = parts[0][0][name]
            else:
                array = np.stack([np.concatenate([half[name] for half in halves]) for halves in parts])
            file[f"{PREFIX}mlp.fc.{name}"] = array
        files.append(file)
    for expert, halves in enumerate(stored):
        for number, half in enumerate(halves):
            effective = half.effective
            if form == "fp8" and expert == 1:
                effective = half.both["weight"].astype(np.float32) * np.float32(0.05)

            def pick(weights: MergedWeights, half: int = number, expert: int = expert) -> Matrix:
                return weights.column_parallel(0, "mlp.fc", size, halves=2, half=half, expert=expert)

            given, found, _ = product(Ranks(form, files), pick, HIDDEN, tmp_path)
            assert_product(found, given, effective)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("tensor", [1, 2])
def test_weight_only_rounds_what_one_rank_holds(bits: int, tensor: int, tmp_path: Path) -> None:
    limit = 2 ** (bits - 1)
    weight = np.random.default_rng(2).normal(size=(HIDDEN, INNER)).astype(ml_dtypes.bfloat16)
    pieces = np.split(weight, tensor, 1)
    effective = []
    for piece in pieces:
        values = piece.astype(np.float32)
        scale = np.abs(values).max(1, keepdims=True) / np.float32(limit)
        ratio = values / scale
        rounded = np.clip(np.sign(ratio) * np.floor(np.abs(ratio) + np.float32(0.5)), -limit, limit - 1)
        effective.append(rounded * scale.astype(ml_dtypes.bfloat16).astype(np.float32))
    files = [{f"{PREFIX}mlp.proj.weight": np.ascontiguousarray(piece)} for piece in pieces]
    given, found, _ = product(
        Ranks(f"int{bits}_wo", files), lambda w: w.row_parallel(0, "mlp.proj", INNER), INNER, tmp_path
    )
    assert_product(found, given, np.concatenate(effective, 1))


def test_an_unknown_form_comes_dequantized(tmp_path: Path) -> None:
    """What the graph cannot keep is asked of the reader, rows at a time."""
    whole = np.random.default_rng(3).normal(size=(HIDDEN, INNER)).astype(np.float32)
    ranks = Ranks("something", [{}, {}])
    columns = INNER // 2
    ranks.weight_rows = lambda _name, rank, begin, end: whole[begin:end, rank * columns : (rank + 1) * columns]  # type: ignore[method-assign]
    given, found, linears = product(ranks, lambda w: w.row_parallel(0, "mlp.proj", INNER), INNER, tmp_path)
    assert_product(found, given, whole)
    assert linears.forms == {"something": "float32, dequantized"}
