"""The plan of rank files: fused, grouped and transposed sources cut by hand, and linears whole beside their shares."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import VARIANTS, shape

from lpxbuild.checkpoint.layout import Piece, RankTensor, plan
from lpxbuild.checkpoint.pieces import read_rows
from lpxbuild.checkpoint.transfer import Sources
from lpxbuild.families import ModelShape, family_named
from lpxbuild.source.records import TensorEntry

Arrays = dict[str, np.ndarray[Any, Any]]


class Written:
    """All tensors of a model with numbers that differ, in one file whose data begin at an odd byte."""

    def __init__(self, path: Path, model: ModelShape, dtype: Any = np.float32) -> None:
        rng = np.random.default_rng(0)
        self.arrays: Arrays = {}
        entries: dict[str, TensorEntry] = {}
        name = {np.float32: "F32", ml_dtypes.bfloat16: "BF16"}[dtype]
        with path.open("wb") as file:
            file.write(b"x")
            for tensor, spec in family_named(model.family).tensors(model).items():
                self.arrays[tensor] = rng.standard_normal(spec.shape).astype(dtype)
                begin = file.tell()
                file.write(self.arrays[tensor].tobytes())
                entries[tensor] = TensorEntry(path, name, spec.shape, begin, file.tell())
        self.sources = Sources(entries)

    def piece(self, piece: Piece) -> np.ndarray[Any, Any]:
        return read_rows(self.sources, piece, 0, piece.rows[1] - piece.rows[0])

    def tensor(self, planned: RankTensor) -> np.ndarray[Any, Any]:
        width = planned.shape[-1] if len(planned.shape) > 1 else 1
        found = np.zeros((planned.size // width, width), np.float32)
        for piece in planned.pieces:
            block = self.piece(piece)
            found[piece.at : piece.at + len(block)] = block
        return found.reshape(planned.shape)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Any]:
    made: list[Written] = []

    def write(model: ModelShape, dtype: Any = np.float32) -> Written:
        made.append(Written(tmp_path / "weights.bin", model, dtype))
        return made[-1]

    yield write
    for files in made:
        files.sources.close()


def planned(model: ModelShape, tensor: int, ending: str) -> list[RankTensor]:
    """The tensors of layer 0 with that ending, by rank."""
    return [item for item in plan(model, tensor, 1) if item.name == f"transformer.layers.0.{ending}"]


def test_phi3_halves_each_branch(written: Any) -> None:
    """HF's [gate; up] → [up; gate] of a rank's own columns."""
    model = shape("phi3")
    files = written(model)
    gate, up = np.split(files.arrays["model.layers.0.mlp.gate_up_proj.weight"], 2)
    for rank, tensor in enumerate(planned(model, 2, "mlp.fc.weight")):
        mine = slice(rank * 64, rank * 64 + 64)
        np.testing.assert_array_equal(files.tensor(tensor), np.concatenate([up[mine], gate[mine]]))


def test_phi3_divides_q_k_and_v_apart(written: Any) -> None:
    model = shape("phi3")
    files = written(model)
    q, k, v = np.split(files.arrays["model.layers.0.self_attn.qkv_proj.weight"], [64, 96])
    for rank, tensor in enumerate(planned(model, 2, "attention.qkv.weight")):
        mine, few = slice(rank * 32, rank * 32 + 32), slice(rank * 16, rank * 16 + 16)
        np.testing.assert_array_equal(files.tensor(tensor), np.concatenate([q[mine], k[few], v[few]]))


def test_gpt2_turns_matrices_round(written: Any) -> None:
    model = shape("gpt2")
    files = written(model, ml_dtypes.bfloat16)
    c_attn = files.arrays["transformer.h.0.attn.c_attn.weight"].T
    bias = files.arrays["transformer.h.0.attn.c_attn.bias"]
    for rank in range(2):
        rows = np.concatenate([np.arange(32) + part * 64 + rank * 32 for part in range(3)])
        weight = planned(model, 2, "attention.qkv.weight")[rank]
        np.testing.assert_array_equal(files.tensor(weight), c_attn[rows].astype(np.float32))
        np.testing.assert_array_equal(
            files.tensor(planned(model, 2, "attention.qkv.bias")[rank]), bias[rows].astype(np.float32)
        )
    c_proj = files.arrays["transformer.h.0.mlp.c_proj.weight"].T
    second = files.tensor(planned(model, 2, "mlp.proj.weight")[1])
    np.testing.assert_array_equal(second, c_proj[:, 128:].astype(np.float32))


@pytest.mark.parametrize(
    ("family", "changes", "source", "kv_heads"),
    [
        ("falcon", {}, "transformer.h.0.self_attention.query_key_value", 1),
        (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            "transformer.h.0.self_attention.query_key_value",
            2,
        ),
        (
            "falcon",
            {"multi_query": False, "parallel_attn": False, "bias": True},
            "transformer.h.0.self_attention.query_key_value",
            4,
        ),
        ("internlm2", {}, "model.layers.0.attention.wqkv", 2),
    ],
)
def test_grouped_heads_are_regrouped(
    written: Any, family: str, changes: dict[str, Any], source: str, kv_heads: int
) -> None:
    """(KV heads, queries of each + key + value, 16, 64) → [Q; K; V] of each rank; one KV head goes to both ranks."""
    model = shape(family, **changes)
    files = written(model)
    groups = files.arrays[f"{source}.weight"].reshape(kv_heads, -1, 16, 64)
    q, k, v = groups[:, :-2].reshape(4, 16, 64), groups[:, -2], groups[:, -1]
    for rank, tensor in enumerate(planned(model, 2, "attention.qkv.weight")):
        some = slice(rank * kv_heads // 2, max((rank + 1) * kv_heads // 2, rank * kv_heads // 2 + 1))
        expected = np.concatenate([q[rank * 2 : rank * 2 + 2], k[some], v[some]]).reshape(-1, 64)
        np.testing.assert_array_equal(files.tensor(tensor), expected)


def test_rows_are_read_from_the_middle_of_a_piece(written: Any) -> None:
    for family, source in (
        ("gpt2", "transformer.h.1.mlp.c_fc.weight"),
        ("phi3", "model.layers.1.mlp.down_proj.weight"),
    ):
        files = written(shape(family))
        matrix = files.arrays[source].T if family == "gpt2" else files.arrays[source]
        piece = Piece(source, (8, 40), (16, 48), 0, transposed=family == "gpt2")
        np.testing.assert_array_equal(read_rows(files.sources, piece, 5, 20), matrix[13:28, 16:48])
        whole = Piece(source, (0, len(matrix)), (0, matrix.shape[1]), 0)
        if family == "phi3":
            assert read_rows(files.sources, whole, 3, 9).flags.c_contiguous


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_shares_of_a_linear_are_rows_and_columns_of_its_parts(
    written: Any, family: str, changes: dict[str, Any], tensor: int
) -> None:
    model = shape(family, **changes)
    files = written(model)
    linears: dict[str, Any] = {}
    for item in plan(model, tensor, 1):
        module = item.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if item.linear is None:
            assert not item.name.endswith(".weight") or module not in ("qkv", "dense", "fc", "gate", "proj")
            continue
        assert linears.setdefault(item.name, item.linear) is item.linear
        parts = [np.concatenate([files.piece(piece) for piece in part.pieces]) for part in item.linear.parts]
        assert [part.shape for part in parts] == [part.shape for part in item.linear.parts]
        for piece in item.pieces:
            block = files.piece(piece)
            rows = slice(piece.part_row, piece.part_row + len(block))
            first = 0 if item.linear.split != "row" else item.rank * block.shape[1]
            np.testing.assert_array_equal(block, parts[piece.part][rows, first : first + block.shape[1]])
    assert len(linears) == model.num_hidden_layers * (5 if model.mlp == "gated" else 4)


def test_parts_are_named_by_role_and_module() -> None:
    (fc,) = planned(shape("phi3"), 1, "mlp.fc.weight")
    assert fc.linear is not None
    module = "model.layers.0.mlp.gate_up_proj"
    assert [(part.role, part.module) for part in fc.linear.parts] == [("up", module), ("gate", module)]
    (qkv,) = planned(shape("gemma"), 1, "attention.qkv.weight")
    assert qkv.linear is not None
    assert [part.module for part in qkv.linear.parts] == [f"model.layers.0.self_attn.{role}_proj" for role in "qkv"]
    assert (qkv.linear.split, qkv.linear.layer, qkv.linear.module) == ("qkv", 0, "transformer.layers.0.attention.qkv")


def test_layers_of_a_linear_count_over_the_whole_model() -> None:
    last = [item.linear for item in plan(shape("granite"), 1, 2) if item.rank == 1 and item.linear is not None][-1]
    assert (last.module, last.layer) == ("transformer.layers.1.mlp.proj", 3)
