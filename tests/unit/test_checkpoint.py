"""Checkpoints of every family and split against the layout's rules, written down here a second time."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import convert, read
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import Tensors, checked, config_for, hf_tensors, read_safetensors, write_source

CONFIGS = {
    "llama": config_for("llama"),
    "llama-biases": config_for("llama", attention_bias=True, mlp_bias=True),
    "llama-tied": config_for("llama", tie_word_embeddings=True),
    "llama-2-kv-heads": config_for("llama", num_key_value_heads=2),
    "mistral": config_for("mistral", sliding_window=8, head_dim=8),
    "qwen2-1-kv-head": config_for("qwen2", num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": config_for("qwen3", head_dim=32),
}
SPLITS = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 3), (1, 5)]


def expected_rank(config: dict[str, Any], tensors: Tensors, tensor: int, pipeline: int, rank: int) -> Tensors:
    """One rank file by the rules of TensorRT-LLM's layout."""
    stage, part = divmod(rank, tensor)
    layers = np.array_split(np.arange(config["num_hidden_layers"]), pipeline)[stage]
    copies = max(tensor // config["num_key_value_heads"], 1)

    def rows(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.split(weight, tensor)[part]

    def columns(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.split(weight, tensor, axis=1)[part]

    def vocabulary(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        missing = -len(weight) % tensor
        return rows(np.concatenate([weight, np.zeros((missing, weight.shape[1]), weight.dtype)]))

    def copied(weight: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        by_head = weight.reshape(config["num_key_value_heads"], -1, *weight.shape[1:])
        return np.repeat(by_head, copies, axis=0).reshape(-1, *weight.shape[1:])

    found: Tensors = {}
    if stage == 0:
        found["transformer.vocab_embedding.weight"] = vocabulary(tensors["model.embed_tokens.weight"])
    if stage == pipeline - 1:
        found["transformer.ln_f.weight"] = tensors["model.norm.weight"]
        head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
        found["lm_head.weight"] = vocabulary(tensors[head])
    for local, layer in enumerate(layers):
        source, target = f"model.layers.{layer}.", f"transformer.layers.{local}."
        found[f"{target}input_layernorm.weight"] = tensors[f"{source}input_layernorm.weight"]
        found[f"{target}post_layernorm.weight"] = tensors[f"{source}post_attention_layernorm.weight"]
        for kind in ("weight", "bias"):
            if f"{source}self_attn.q_proj.{kind}" in tensors:
                q, k, v = (tensors[f"{source}self_attn.{name}_proj.{kind}"] for name in "qkv")
                found[f"{target}attention.qkv.{kind}"] = np.concatenate([rows(q), rows(copied(k)), rows(copied(v))])
            for name, hf in (("fc", "gate_proj"), ("gate", "up_proj")):
                if f"{source}mlp.{hf}.{kind}" in tensors:
                    found[f"{target}mlp.{name}.{kind}"] = rows(tensors[f"{source}mlp.{hf}.{kind}"])
        for name, hf in (("attention.dense", "self_attn.o_proj"), ("mlp.proj", "mlp.down_proj")):
            found[f"{target}{name}.weight"] = columns(tensors[f"{source}{hf}.weight"])
            if f"{source}{hf}.bias" in tensors:
                found[f"{target}{name}.bias"] = tensors[f"{source}{hf}.bias"]
        for name in "qk":
            if f"{source}self_attn.{name}_norm.weight" in tensors:
                found[f"{target}attention.{name}_layernorm.weight"] = tensors[f"{source}self_attn.{name}_norm.weight"]
    return found


@pytest.mark.parametrize(("tensor", "pipeline"), SPLITS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_rank_of_every_split(tmp_path: Path, name: str, tensor: int, pipeline: int) -> None:
    config = CONFIGS[name]
    tensors = hf_tensors(config)
    source = checked(
        write_source(tmp_path / "source", config, tensors), tensor_parallel=tensor, pipeline_parallel=pipeline
    )
    report = convert(
        source, tmp_path / "out", dtype="auto", tensor_parallel=tensor, pipeline_parallel=pipeline, workers=1
    )
    reader = read(tmp_path / "out")
    assert reader.world == (tensor, pipeline)
    assert len(report.ranks) == tensor * pipeline
    for rank in range(tensor * pipeline):
        expected = expected_rank(config, tensors, tensor, pipeline, rank)
        found = read_safetensors(tmp_path / "out" / f"rank{rank}.safetensors")
        assert set(found) == set(expected) == reader.names(rank)
        for tensor_name, values in expected.items():
            np.testing.assert_array_equal(found[tensor_name], values, err_msg=f"{tensor_name} of rank {rank}")
            np.testing.assert_array_equal(reader.tensor(tensor_name, rank), values)


@pytest.mark.parametrize("name", CONFIGS)
def test_reader_gives_the_shape_back(tmp_path: Path, name: str) -> None:
    source = checked(write_source(tmp_path / "source", CONFIGS[name], hf_tensors(CONFIGS[name])))
    convert(source, tmp_path / "out", dtype="auto")
    assert read(tmp_path / "out").shape == source.shape


def test_reader_gives_rope_and_window_back(tmp_path: Path) -> None:
    config = config_for(
        "qwen2",
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=2,
        rope_theta=1e6,
        rope_scaling={"type": "yarn", "factor": 4.0},
    )
    source = checked(write_source(tmp_path / "source", config, hf_tensors(config)))
    convert(source, tmp_path / "out", dtype="auto")
    reader = read(tmp_path / "out")
    assert reader.shape == source.shape
    assert reader.config["rotary_scaling"]["type"] == "yarn"
    assert reader.config["lpx"]["layer_types"] == ["full_attention"] * 2 + ["sliding_attention"] * 3


def test_more_ranks_than_vocabulary_rows(tmp_path: Path) -> None:
    """5 rows on 4 ranks are 2 each: the third rank has one row and one of padding, the last padding only."""
    config = config_for(vocab_size=5)
    tensors = hf_tensors(config)
    convert(
        checked(write_source(tmp_path / "source", config, tensors)), tmp_path / "out", dtype="auto", tensor_parallel=4
    )
    parts = [read(tmp_path / "out").tensor("lm_head.weight", rank) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts)[:5], tensors["lm_head.weight"])
    assert not np.concatenate(parts)[5:].any()


def test_workers_and_runs_give_the_same_bytes(tmp_path: Path) -> None:
    config = config_for()
    source = checked(write_source(tmp_path / "source", config, hf_tensors(config)))
    written = []
    for workers in (1, 4, 4):
        folder = tmp_path / f"out{len(written)}"
        convert(source, folder, dtype="float16", tensor_parallel=2, pipeline_parallel=2, workers=workers)
        written.append({file.name: file.read_bytes() for file in folder.iterdir()})
    assert written[0] == written[1] == written[2]


@pytest.mark.parametrize("padding", range(8))
def test_any_alignment_of_the_source(tmp_path: Path, padding: int) -> None:
    """Old safetensors files begin their data at any byte."""
    config = config_for(num_hidden_layers=1)
    tensors = hf_tensors(config)
    folder = write_source(tmp_path / "source", config, tensors, padding=padding)
    convert(checked(folder), tmp_path / "out", dtype="float16", tensor_parallel=2)
    expected = expected_rank(config, tensors, 2, 1, 1)
    for name, values in read_safetensors(tmp_path / "out/rank1.safetensors").items():
        np.testing.assert_array_equal(values, expected[name].astype(np.float16))


def test_tensors_of_several_types_become_one(tmp_path: Path) -> None:
    config = config_for(num_hidden_layers=1, torch_dtype="bfloat16")
    tensors = hf_tensors(config)
    mixed = {name: values if "norm" in name else values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()}
    report = convert(checked(write_source(tmp_path / "source", config, mixed)), tmp_path / "out", dtype="auto")
    assert report.dtype == "bfloat16"
    assert report.casts == {"F32": 3}
    found = read_safetensors(tmp_path / "out/rank0.safetensors")
    assert {values.dtype for values in found.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_report_counts(tmp_path: Path) -> None:
    """77·64 embedding and head, 64 norm; a layer: 2·64 norms, 64·(128 + 64 + 64 + 128) attention, 3·64·96 MLP."""
    config = config_for()
    source = checked(write_source(tmp_path / "source", config, hf_tensors(config)))
    report = convert(source, tmp_path / "out", dtype="float16", tensor_parallel=2)
    assert report.parameters == 2 * 77 * 64 + 64 + 5 * (2 * 64 + 64 * 384 + 3 * 64 * 96)
    assert [rank.file for rank in report.ranks] == ["rank0.safetensors", "rank1.safetensors"]
    for rank in report.ranks:
        assert rank.bytes == (tmp_path / "out" / rank.file).stat().st_size
        assert rank.tensors == 3 + 5 * 7
    assert report.bytes == sum(rank.bytes for rank in report.ranks)
    json.dumps(asdict(report))  # goes into the manifest


def test_end_ids_that_only_config_json_knows_go_along(tmp_path: Path) -> None:
    """Preprocessing takes them from the tokenizer's folder; without them nothing would end a generation."""
    config = config_for(eos_token_id=[3, 2])
    folder = write_source(tmp_path / "source", config, hf_tensors(config))
    baseline = Path(__file__).parents[1] / "cases/data/baseline"
    (folder / "tokenizer.json").write_bytes((baseline / "tokenizer.json").read_bytes())
    convert(checked(folder), tmp_path / "out", dtype="auto")
    carried = json.loads((tmp_path / "out/tokenizer/generation_config.json").read_text())
    assert carried["eos_token_id"] == [3, 2]


def test_tokenizer_goes_along(tmp_path: Path) -> None:
    config = config_for()
    folder = write_source(tmp_path / "source", config, hf_tensors(config))
    convert(checked(folder), tmp_path / "without", dtype="auto")
    assert not (tmp_path / "without/tokenizer").exists()
    baseline = Path(__file__).parents[1] / "cases/data/baseline"
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((baseline / name).read_bytes())
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    convert(checked(folder), tmp_path / "with", dtype="auto")
    assert sorted(file.name for file in (tmp_path / "with/tokenizer").iterdir()) == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (tmp_path / "with/tokenizer/tokenizer.json").read_bytes() == (baseline / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("name", "algorithm"), [("none", None), ("int8_wo", "W8A16"), ("int4_wo", "W4A16")])
def test_weight_only_formats_keep_plain_weights(tmp_path: Path, name: str, algorithm: str | None) -> None:
    config = config_for()
    tensors = hf_tensors(config)
    folder = tmp_path / "out"
    convert(checked(write_source(tmp_path / "source", config, tensors)), folder, dtype="auto", scheme=Scheme(name))
    assert json.loads((folder / "config.json").read_text())["quantization"] == {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "exclude_modules": None,
    }
    found = read_safetensors(folder / "rank0.safetensors")
    np.testing.assert_array_equal(
        found["transformer.layers.0.mlp.fc.weight"], tensors["model.layers.0.mlp.gate_proj.weight"]
    )


def test_what_the_layout_has_no_field_for(tmp_path: Path) -> None:
    config = config_for("mistral", sliding_window=8)
    convert(checked(write_source(tmp_path / "source", config, hf_tensors(config))), tmp_path / "out", dtype="auto")
    assert json.loads((tmp_path / "out/config.json").read_text())["lpx"] == {
        "format_version": 2,
        "family": "mistral",
        "quantization_format": "none",
        "scheme": {"format": "none", "kv_cache": "none", "group_size": 128, "exclude": [], "overrides": {}},
        "end_ids": [2],
        "pad_id": 2,
        "bos_id": 1,
        "source": "tiny",
        "hidden_act": "silu",
        "sliding_window": 8,
        "layer_types": None,
    }


class TestRefusals:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Any:
        config = config_for()
        return checked(write_source(tmp_path / "source", config, hf_tensors(config)))

    def test_formats_and_caches_without_a_calibration(self, source: Any, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match="fp8"):
            convert(source, tmp_path / "out", dtype="auto", scheme=Scheme("fp8"))
        with pytest.raises(RecipeError, match="kv_cache int8"):
            convert(source, tmp_path / "out", dtype="auto", scheme=Scheme(kv_cache="int8"))
        assert not (tmp_path / "out").exists()

    def test_splits_that_do_not_fit(self, source: Any, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="num_attention_heads 8"):
            convert(source, tmp_path / "out", dtype="auto", tensor_parallel=3)
        assert not (tmp_path / "out").exists()


class TestReader:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        config = config_for()
        source = checked(write_source(tmp_path / "source", config, hf_tensors(config)))
        convert(source, tmp_path / "out", dtype="auto", tensor_parallel=2, output=Output.quiet())
        return tmp_path / "out"

    def test_missing_rank_is_named(self, folder: Path) -> None:
        (folder / "rank1.safetensors").unlink()
        with pytest.raises(SourceError, match=r"rank1\.safetensors of the checkpoint is missing"):
            read(folder)

    def test_cut_rank_is_named_with_both_sizes(self, folder: Path) -> None:
        file = folder / "rank0.safetensors"
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(size - 4)
        with pytest.raises(SourceError, match=r"rank0\.safetensors of the checkpoint is damaged") as caught:
            read(folder)
        assert f"{size - 4} bytes, {size} are expected" in caught.value.why

    def test_rank_of_another_model(self, folder: Path) -> None:
        file = folder / "rank0.safetensors"
        data = file.read_bytes()
        file.write_bytes(data.replace(b"mlp.fc.weight", b"mlp.ab.weight", 1))
        with pytest.raises(SourceError, match=r"rank0\.safetensors of the checkpoint is damaged"):
            read(folder)

    @pytest.mark.parametrize("value", [None, [], [1], {}, "x", -1, 2.5, 10**30, 2**31 - 1], ids=str)
    def test_a_config_with_any_value_is_read_or_refused(self, folder: Path, value: Any) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        for key in (*config, "tp_size", "pp_size"):
            place = config["mapping"] if key.endswith("_size") and key in config["mapping"] else config
            before = place[key]
            place[key] = value
            file.write_text(json.dumps(config))
            with contextlib.suppress(SourceError):
                read(folder)
            place[key] = before

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "config.json of the checkpoint is missing"),
            ("{", "not valid JSON"),
            ("[]", "not a JSON object"),
            ("{}", "no `lpx` entry"),
            ('{"lpx": {"family": "llama", "format_version": 3}}', "format version 3"),
            ('{"lpx": {"family": "llama", "format_version": 2}}', "key 'position_embedding_type' is missing"),
        ],
    )
    def test_config(self, folder: Path, text: str | None, message: str) -> None:
        file = folder / "config.json"
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        with pytest.raises(SourceError) as caught:
            read(folder)
        assert message in str(caught.value)
