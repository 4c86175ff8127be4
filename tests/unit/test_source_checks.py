"""Checks of a folder beyond the collected cases: each starts from a good checkpoint and breaks one thing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.source import Source, check, tokenizer_files

CASES = Path(__file__).parents[1] / "cases" / "data"


@pytest.fixture
def model(tmp_path) -> Path:
    return shutil.copytree(CASES / "baseline", tmp_path / "model")


@pytest.fixture
def sharded(tmp_path) -> Path:
    return shutil.copytree(CASES / "baseline_tp2", tmp_path / "sharded")


def checked(folder: Path, **options) -> Source:
    return check(folder, **{"origin": str(folder), "need_tokenizer": True, "output": Output.quiet(), **options})


def edit(folder: Path, name: str = "config.json", **changes) -> None:
    path = folder / name
    value = json.loads(path.read_text()) if path.exists() else {}
    value.update(changes)
    path.write_text(json.dumps({key: item for key, item in value.items() if item is not ...}))


def rewrite(folder: Path, change, name: str = "model.safetensors") -> None:
    """Change the tensors of a file with the safetensors library: `change(dict name -> array)`."""
    import ml_dtypes  # noqa: F401 - teaches numpy bfloat16
    from safetensors.numpy import load_file, save_file

    arrays = load_file(folder / name)
    change(arrays)
    save_file(arrays, folder / name)


def refusal(folder: Path, **options) -> SourceError:
    with pytest.raises(SourceError) as caught:
        checked(folder, **options)
    assert caught.value.next
    return caught.value


def test_the_files_of_a_build_are_listed_without_hashing(model):
    source = checked(model)
    names = [file.name for file in source.files]
    assert names == sorted(names)
    assert set(names) == {path.name for path in model.iterdir()} - {"case.json"}
    assert all(file.size == (model / file.name).stat().st_size and file.sha256 is None for file in source.files)
    assert source.revision is None
    assert source.bos_id == 1
    assert [path.name for path in tokenizer_files(model)] == ["tokenizer.json", "tokenizer_config.json"]


def test_no_weight_is_read(model):
    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    checked(model)  # imports are over
    begun = bytes_read()
    checked(model)
    others = sum(path.stat().st_size for path in model.iterdir() if path.suffix == ".json")
    weights = (model / "model.safetensors").stat().st_size
    assert bytes_read() - begun < min(4 * others, weights / 2)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_broken_json_is_named(model, name):
    (model / name).write_text('{"a": 1,')
    assert name in refusal(model).what


def test_json_that_is_no_object(model):
    (model / "config.json").write_text("[]")
    assert "not an object" in refusal(model).what


def test_lfs_pointers_of_small_files(model):
    (model / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "tokenizer.json is a Git LFS pointer" in refusal(model).what


def test_no_config_of_any_kind(tmp_path):
    assert "no config.json" in refusal(tmp_path).what
    (tmp_path / "params.json").write_text("{}")
    assert "original Meta" in refusal(tmp_path).why
    (tmp_path / "a.gguf").touch()
    assert str(tmp_path / "a.gguf") in refusal(tmp_path).next


def test_other_weight_formats_are_named(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    error = refusal(model)
    assert "neither model.safetensors nor model.safetensors.index.json" in error.what
    assert "pytorch_model.bin" in error.why


def test_missing_path(tmp_path):
    assert "no such file or folder" in refusal(tmp_path / "absent").what


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "gptq"),
        ({"quant_method": "fp8", "activation_scheme": "guessed"}, "fp8"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"bits": 4, "group_size": 128}, "gptq"),
        ({"w_bit": 8}, "awq"),
        ({"quant_algo": "MXFP8"}, "modelopt"),
        ({"quant_method": "wavelets"}, "wavelets"),
    ],
)
def test_quantized_sources_by_method(model, settings, method):
    edit(model, quantization_config=settings)
    assert f"method {method}" in refusal(model).what


@pytest.mark.parametrize("settings", [{"quant_method": "fp8"}, {"quant_algo": "NVFP4"}, {"w_bit": 4}])
def test_plain_weights_under_quantization_settings(model, settings):
    edit(model, quantization_config=settings)
    assert "model.layers.0.self_attn.q_proj." in refusal(model).what


def test_quantization_files_beside_a_clean_config(model):
    edit(model, "hf_quant_config.json", quantization={"quant_algo": "FP5"})
    error = refusal(model)
    assert "hf_quant_config.json" in error.what
    assert "method modelopt; quant_algo FP5" in error.what


def test_integer_weights_are_quantized_weights(model):
    import numpy as np

    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(model, lambda arrays: arrays.update({name: arrays[name].view(np.int16).astype(np.int8)}))
    error = refusal(model)
    assert name in error.what
    assert "I8" in error.what


def test_a_wrong_shape_gives_both(model):
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(model, lambda arrays: arrays.update({name: arrays[name][:-1].copy()}))
    error = refusal(model)
    assert name in error.what
    assert "[31, 64]" in error.what
    assert "[32, 64]" in error.what


def test_a_single_absent_tensor_names_its_layer(model):
    rewrite(model, lambda arrays: arrays.pop("model.layers.1.mlp.down_proj.weight"))
    error = refusal(model)
    assert "model.layers.1.mlp.down_proj.weight (layer 1)" in error.what


def test_more_layers_than_the_config_says(model):
    edit(model, num_hidden_layers=1)
    error = refusal(model)
    assert "layer 1" in error.what
    assert "num_hidden_layers 1" in error.what


def test_biases_that_the_config_denies_are_not_dropped(model):
    import numpy as np

    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(model, lambda arrays: arrays.update({name: np.zeros(64, np.float32)}))
    assert name in refusal(model).what


def test_tensors_beside_the_model_are_left_out_with_a_notice(model):
    import numpy as np

    rewrite(model, lambda arrays: arrays.update({"v_head.summary.weight": np.zeros(4, np.float32)}))
    source = checked(model)
    assert "v_head.summary.weight" not in source.tensors
    assert source.notices == ("left out, not part of a llama model: v_head.summary.weight",)


def test_another_dtype_than_the_config_says(model):
    edit(model, torch_dtype="float16")
    source = checked(model)
    assert source.shape.dtype == "float16"
    (notice,) = source.notices
    assert "config.json says float16" in notice
    assert f"{len(source.tensors)} of {len(source.tensors)} tensors are bfloat16" in notice


def test_without_a_dtype_the_files_decide(model):
    edit(model, torch_dtype=...)
    assert checked(model).shape.dtype == "bfloat16"


def test_pipeline_beyond_the_layers(model):
    error = refusal(model, pipeline_parallel=3)
    assert "num_hidden_layers 2" in error.what
    assert "3" in error.what


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {}}, "no weight_map"),
        ({"weight_map": {"a": 3}}, "no weight_map"),
        ({"weight_map": {"a": "../model.safetensors"}}, "not a safetensors file of this folder"),
        ({"weight_map": {"a": "model.bin"}}, "not a safetensors file of this folder"),
    ],
)
def test_broken_indexes(sharded, index, word):
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert word in refusal(sharded).what


def test_a_tensor_in_two_files_is_taken_where_the_index_says(sharded):
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    name = "model.embed_tokens.weight"
    taken = {}
    rewrite(sharded, taken.update, first)
    rewrite(sharded, lambda arrays: arrays.update({name: taken[name]}), second)
    assert checked(sharded).tensors[name].file.name == first
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = second
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checked(sharded).tensors[name].file.name == second


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "end", "pad"),
    [
        ({"eos_token_id": 5}, {}, {}, (5, 2), 0),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {}, (7, 2), 0),
        ({}, {"eos_token_id": [2, 9, 2]}, {}, (2, 9), 0),
        ({"pad_token_id": 4}, {}, {}, (2,), 4),
        ({"pad_token_id": -1}, {}, {"pad_token": ...}, (2,), 2),
        ({"pad_token_id": None}, {}, {"pad_token": ...}, (2,), 2),
        ({"eos_token_id": None}, {"eos_token_id": ...}, {}, (2,), 0),
        ({"eos_token_id": None}, {"eos_token_id": ...}, {"eos_token": ..., "pad_token": ...}, (), 0),
        ({}, {}, {"eos_token": {"content": "<pad>"}}, (2, 0), 0),
    ],
)
def test_end_and_pad_ids(model, config, generation, tokenizer, end, pad):
    edit(model, "generation_config.json", **generation)
    edit(model, **config)
    edit(model, "tokenizer_config.json", **tokenizer)
    if "eos_token_id" not in generation and "eos_token_id" in config:
        edit(model, "generation_config.json", eos_token_id=...)
    source = checked(model)
    assert source.end_ids == end
    assert source.pad_id == pad
    assert bool(source.notices) == (end not in ((2,), (7,), (2, 9)))


@pytest.mark.parametrize(("key", "value"), [("eos_token_id", 320), ("pad_token_id", 99999), ("bos_token_id", 320)])
def test_ids_beyond_the_vocabulary_are_refused(model, key, value):
    edit(model, "generation_config.json", **{key: value})
    error = refusal(model)
    assert f"{key} is {value}" in error.what
    assert "vocab_size is 320" in error.what


@pytest.mark.parametrize("value", ["2", 2.0, True, -5, [2, "3"]])
def test_ids_that_are_no_ids(model, value):
    edit(model, "generation_config.json", eos_token_id=value)
    assert "eos_token_id is" in refusal(model).what


def test_only_a_slow_tokenizer(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").touch()
    error = refusal(model)
    assert "only tokenizer.model" in error.why
    assert "save_pretrained" in error.next
    assert checked(model, need_tokenizer=False).end_ids == (2,)


def test_a_tokenizer_of_another_version_is_said_with_the_version(model):
    import tokenizers

    edit(model, "tokenizer.json", model={"type": "Holographic"})
    error = refusal(model)
    assert f"tokenizers {tokenizers.__version__}" in error.what


def test_commands_name_the_hub_repository(sharded):
    (sharded / "model-00001-of-00002.safetensors").unlink()
    error = refusal(sharded, origin="org/name", revision="a" * 40)
    command = f"hf download org/name model-00001-of-00002.safetensors --revision {'a' * 40} --local-dir {sharded}"
    assert error.next == command
