"""Every case that converts: config.json as case.json says, and tensors where the known mistakes would show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import CheckpointReader, ConversionReport, convert, read
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import check

if TYPE_CHECKING:
    from conftest import Case

DATA = Path(__file__).parent / "data"
CONVERTING = sorted(
    path.parent.name
    for path in DATA.glob("*/case.json")
    if json.loads(path.read_text())["outcome"] != "refuses" or path.parent.name == "tokenizer_absent"
    # Refused by name (test_refusals): a parameter nobody knows inside the model.
    if path.parent.name != "extra_unknown"
)
Converted = tuple[CheckpointReader, ConversionReport, Output]
Convert = Callable[[str], Converted]


@pytest.fixture
def converted(tmp_path: Path, load_case: Callable[[str], Case]) -> Convert:
    def run(name: str) -> Converted:
        case = load_case(name)
        output = Output.quiet()
        source = check(
            case.path, origin=name, need_tokenizer=False, tensor_parallel=case.tensor_parallel, output=output
        )
        report = convert(
            source,
            tmp_path / "checkpoint",
            dtype=case.expected["recipe"]["dtype"],
            scheme=Scheme(case.expected["recipe"]["quantization"]),
            tensor_parallel=case.tensor_parallel,
            output=output,
        )
        return read(tmp_path / "checkpoint"), report, output

    return run


def hf(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """All tensors of a case's files, by the format's description."""
    tensors = {}
    for path in sorted((DATA / name).glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for tensor, entry in json.loads(data[8 : 8 + length]).items():
            if tensor != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                kind = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "F16": np.float16}[entry["dtype"]]
                tensors[tensor] = np.frombuffer(data[begin:end], kind).reshape(entry["shape"])
    return tensors


def contains(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(key in found and contains(found[key], value) for key, value in expected.items())
    return bool(found == expected)


@pytest.mark.parametrize("name", CONVERTING)
def test_config_is_as_the_case_says(converted: Convert, load_case: Callable[[str], Case], name: str) -> None:
    reader, _, _ = converted(name)
    for key, value in load_case(name).expected["config"].items():
        assert contains(reader.config[key], value), (key, reader.config[key], value)


@pytest.mark.parametrize("name", ["baseline", "baseline_tp2", "eos_list", "extra_inv_freq", "qwen3_qk_norm"])
def test_nothing_to_say(converted: Convert, name: str) -> None:
    assert converted(name)[2].notices == []


def test_eos_list(converted: Convert, load_case: Callable[[str], Case]) -> None:
    lpx = converted("eos_list")[0].config["lpx"]
    assert lpx["end_ids"] == load_case("eos_list").expected["stop_ids"]
    assert lpx["pad_id"] == 0


def test_rope_llama3_keeps_all_five(converted: Convert) -> None:
    scaling = converted("rope_llama3")[0].config["rotary_scaling"]
    given = json.loads((DATA / "rope_llama3/config.json").read_text())["rope_scaling"]
    assert len(given) == 5
    for key, value in given.items():
        assert scaling[key] == value


def test_rope_yarn_keeps_its_numbers(converted: Convert) -> None:
    scaling = converted("rope_yarn")[0].config["rotary_scaling"]
    for key, value in json.loads((DATA / "rope_yarn/config.json").read_text())["rope_scaling"].items():
        assert scaling[key] == value


def test_rope_v5_theta_is_exact(converted: Convert) -> None:
    config = converted("rope_v5_theta")[0].config
    assert config["rotary_base"] == 1000000.0
    assert config["rotary_scaling"] is None
    assert config["dtype"] == "bfloat16"


def test_kv_heads_below_tp(converted: Convert, load_case: Callable[[str], Case]) -> None:
    """KV heads of the ranks 0 0 1 1, weights and biases alike."""
    expected = load_case("kv_heads_below_tp").expected
    reader, tensors = converted("kv_heads_below_tp")[0], hf("kv_heads_below_tp")
    for rank, head in enumerate(expected["kv_head_of_rank"]):
        for kind in ("weight", "bias"):
            rows = reader.tensor(f"transformer.layers.1.attention.qkv.{kind}", rank)
            assert len(rows) == expected["qkv_rows_per_rank"]
            prefix = "model.layers.1.self_attn."
            np.testing.assert_array_equal(rows[:16], tensors[f"{prefix}q_proj.{kind}"][16 * rank : 16 * rank + 16])
            np.testing.assert_array_equal(rows[16:32], tensors[f"{prefix}k_proj.{kind}"][16 * head : 16 * head + 16])
            np.testing.assert_array_equal(rows[32:], tensors[f"{prefix}v_proj.{kind}"][16 * head : 16 * head + 16])


def test_head_dim_explicit(converted: Convert) -> None:
    """hidden 64, 4 heads of 32, 2 ranks: 64 rows of q, 64 columns of o_proj per rank."""
    reader, tensors = converted("head_dim_explicit")[0], hf("head_dim_explicit")
    for rank in (0, 1):
        qkv = reader.tensor("transformer.layers.0.attention.qkv.weight", rank)
        np.testing.assert_array_equal(
            qkv[:64], tensors["model.layers.0.self_attn.q_proj.weight"][64 * rank : 64 * rank + 64]
        )
        dense = reader.tensor("transformer.layers.0.attention.dense.weight", rank)
        assert dense.shape == (64, 64)


def test_qwen2_qkv_bias(converted: Convert) -> None:
    reader, tensors = converted("qwen2_qkv_bias")[0], hf("qwen2_qkv_bias")
    prefix = "model.layers.0.self_attn."
    parts = [tensors[f"{prefix}{name}_proj.bias"] for name in "qkv"]
    for rank in (0, 1):
        expected = np.concatenate([np.split(part, 2)[rank] for part in parts])
        np.testing.assert_array_equal(reader.tensor("transformer.layers.0.attention.qkv.bias", rank), expected)
        assert "transformer.layers.0.attention.dense.bias" not in reader.names(rank)


def test_qwen3_qk_norm(converted: Convert) -> None:
    reader, tensors = converted("qwen3_qk_norm")[0], hf("qwen3_qk_norm")
    for name in "qk":
        np.testing.assert_array_equal(
            reader.tensor(f"transformer.layers.1.attention.{name}_layernorm.weight", 0),
            tensors[f"model.layers.1.self_attn.{name}_norm.weight"],
        )


@pytest.mark.parametrize("name", ["tied_no_lm_head", "tied_with_equal_head"])
def test_tied_head_is_the_embedding(converted: Convert, name: str) -> None:
    reader, tensors = converted(name)[0], hf(name)
    heads = [reader.tensor("lm_head.weight", rank) for rank in range(reader.tensor_parallel)]
    np.testing.assert_array_equal(np.concatenate(heads), tensors["model.embed_tokens.weight"])
    tables = [reader.tensor("transformer.vocab_embedding.weight", rank) for rank in range(reader.tensor_parallel)]
    np.testing.assert_array_equal(np.concatenate(tables), tensors["model.embed_tokens.weight"])


def test_vocab_odd_tp2(converted: Convert) -> None:
    """321 rows become 161 per rank; the last one is padding, zero; vocab_size stays 321."""
    reader, tensors = converted("vocab_odd_tp2")[0], hf("vocab_odd_tp2")
    heads = [reader.tensor("lm_head.weight", rank) for rank in (0, 1)]
    assert [len(head) for head in heads] == [161, 161]
    np.testing.assert_array_equal(np.concatenate(heads)[:321], tensors["lm_head.weight"])
    assert not heads[1][160].any()


def test_sliding_window_is_carried(converted: Convert) -> None:
    assert converted("sliding_window_mistral")[0].config["lpx"]["sliding_window"] == 8


def test_added_token_beyond_vocab_is_named(converted: Convert, load_case: Callable[[str], Case]) -> None:
    case = load_case("added_token_beyond_vocab")
    assert case.missing_words(" ".join(converted("added_token_beyond_vocab")[2].notices)) == []
