"""All exports of NVIDIA ModelOpt bit for bit, and each difference of tensors and config.json with its reason."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lpxbuild.checkpoint import convert
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme

sys.path.insert(0, str(Path(__file__).parent))
from oracle_goldens import (  # isort: skip
    GOLDENS,
    SCHEMES,
    TABLE,
    UNKNOWN,
    calibration,
    their_config,
    digests,
    named,
    parts,
    ranks,
    refusal,
    source,
    table,
)

DTYPES = {"fp16": "float16"}  # the others are bfloat16
AWQ = ("int4awq", "int4awq64", "w4a8awq")
VOCABULARY = ("transformer.vocab_embedding.weight", "lm_head.weight")
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    def run(golden: str, scheme: Scheme | None = None, pipeline_parallel: int = 1) -> Path:
        model, kind, tensor_parallel = parts(golden)
        destination = tmp_path_factory.mktemp(golden) / "checkpoint"
        convert(
            source(model, tensor_parallel),
            destination,
            dtype=DTYPES.get(kind, "bfloat16"),
            scheme=scheme or SCHEMES[kind],
            calibration=calibration(golden),
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            output=Output.quiet(),
        )
        return destination

    return run


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_all_are_here() -> None:
    assert len(GOLDENS) == 128


@pytest.mark.parametrize("golden", GOLDENS)
def test_every_tensor_has_the_bits_of_modelopt(export: Export, golden: str) -> None:
    """But for the vocabulary of AWQ exports and Gemma's head, which have tests of their own."""
    model, kind, _ = parts(golden)
    folder = export(golden)
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [
        f"rank{rank}.safetensors" for rank in range(len(ranks(golden)))
    ]
    for rank, expected in enumerate(ranks(golden)):
        found = digests(folder / f"rank{rank}.safetensors")
        if model == "gemma":
            assert found.pop("lm_head.weight") == expected["transformer.vocab_embedding.weight"]
        if model == "llama-v257" and kind in AWQ:
            for name in VOCABULARY:
                del found[name], expected[name]
        for linear in UNKNOWN.get(golden.rpartition("-TP")[0], ()):
            for suffix in ("weight", "weights_scaling_factor", "weights_scaling_factor_2"):
                for tensors in (found, expected):
                    tensors.get(f"{linear}.{suffix}", {}).pop("sha256", None)
        assert found == expected


@pytest.mark.parametrize("golden", named("bf16", "fp8kv", "int8sqkv8", "int4awq64", "nvfp4", "fp8pcpt"))
def test_safetensors_own_reader_opens_the_files(export: Export, golden: str) -> None:
    folder = export(golden)
    for rank, tensors in enumerate(ranks(golden)):
        with safe_open(folder / f"rank{rank}.safetensors", framework="numpy") as file:
            assert set(file.keys()) >= set(tensors)


@pytest.mark.parametrize("golden", GOLDENS)
def test_config_fields_that_modelopt_writes_rightly(export: Export, golden: str) -> None:
    model, kind, _ = parts(golden)
    ours, theirs = config(export(golden)), their_config(golden)
    wrong = {
        "gpt2": {"hidden_act", "position_embedding_type"},
        "llama-v257": {"vocab_size"} if kind in AWQ else set(),
    }.get(model, set())
    if kind == "w4a16nvfp4":
        wrong |= {"hidden_size"}
    for key in {
        "architecture",
        "dtype",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "hidden_size",
        "intermediate_size",
        "head_size",
        "norm_epsilon",
        "vocab_size",
        "max_position_embeddings",
        "hidden_act",
        "use_parallel_embedding",
        "embedding_sharding_dim",
        "position_embedding_type",
        *({"rotary_base"} if "rotary_base" in theirs else set()),
    } - wrong:
        assert ours[key] == theirs[key], key
    for key, value in theirs["mapping"].items():
        assert ours["mapping"][key] == value
    for key, value in theirs["quantization"].items():
        if key != "exclude_modules":
            assert ours["quantization"][key] == value, key


def test_the_table_in_the_docs_is_fresh() -> None:
    """Written by `python tests/parity/oracle_goldens.py`."""
    assert TABLE.read_text() == table()


def test_what_no_release_could_load_is_refused_by_the_build() -> None:
    """192 rows of qkv are no multiple of 128; 128 input features on two ranks are no groups of 64 each; W4A16_NVFP4 is
    no algorithm of TensorRT-LLM."""
    refused = {golden for golden in GOLDENS if refusal(golden)}
    assert {"llama-int4awq-TP1", "llama-int4awq64-TP2", "llama-h256-w4a16nvfp4-TP1"} <= refused
    assert not refused & set(named("bf16", "fp16", "fp8kv", "int8sqkv8", "nvfp4", "nvfp4kvfp8"))


class TestStages:
    @pytest.mark.parametrize("golden", ["llama-h256-fp8kv-TP2", "llama-h256-int4awq-TP2", "llama-h256-nvfp4-TP1"])
    def test_two_stages_hold_the_same_tensors(self, export: Export, golden: str) -> None:
        """Layers count from 0 in each stage; rank = stage · tensor parallel + tensor rank."""
        folder = export(golden, pipeline_parallel=2)
        count = len(ranks(golden))
        for rank, expected in enumerate(ranks(golden)):
            found = digests(folder / f"rank{rank}.safetensors")
            for name, entry in digests(folder / f"rank{count + rank}.safetensors").items():
                found[name.replace("layers.0.", "layers.1.")] = entry
            assert found == expected


class TestDeliberateDifferences:
    """Where the export is wrong or says nothing, with the reason."""

    def test_biases_have_trtllms_names(self, export: Export) -> None:
        """ModelOpt writes only `bias: true`, which LLaMAConfig does not read: the biases would not be loaded."""
        assert their_config("llama-bias-bf16-TP1")["bias"] is True
        ours = config(export("llama-bias-bf16-TP1"))
        assert (ours["attn_bias"], ours["mlp_bias"]) == (True, True)
        assert "bias" not in ours
        plain = config(export("llama-bf16-TP1"))
        assert (plain["attn_bias"], plain["mlp_bias"]) == (False, False)

    def test_qwen_has_the_fields_its_class_reads(self, export: Export) -> None:
        """QWenConfig needs qwen_type and seq_length (no default), and attn_bias for the q, k, v biases."""
        theirs, ours = their_config("qwen2-bf16-TP1"), config(export("qwen2-bf16-TP1"))
        assert not {"qwen_type", "seq_length", "attn_bias"} & set(theirs)
        assert (ours["qwen_type"], ours["seq_length"], ours["attn_bias"]) == ("qwen2", 8192, True)
        assert ours["mlp_bias"] is False

    def test_gpt2_has_learned_positions(self, export: Export) -> None:
        """ModelOpt's generic config says RoPE for every model; GPTConfig would turn the queries by it. Its "gelu" and
        ours are the same tanh approximation in TensorRT-LLM, and HF's name of the function is gelu_new."""
        theirs, ours = their_config("gpt2-bf16-TP1"), config(export("gpt2-bf16-TP1"))
        assert (theirs["position_embedding_type"], theirs["hidden_act"]) == ("rope_gpt_neox", "gelu")
        assert ours["position_embedding_type"] == "learned_absolute"
        assert ours["hidden_act"] in ("gelu_new", "gelu_pytorch_tanh")

    @pytest.mark.parametrize("golden", [name for name in GOLDENS if name.startswith("gemma-bf16")])
    def test_gemma_has_its_head(self, export: Export, golden: str) -> None:
        """TensorRT-LLM's own Gemma converter writes lm_head.weight, the rows of the embedding; the loader forgives the
        lack of it only where the embedding's shard has the same shape. ModelOpt leaves it out."""
        for rank, theirs in enumerate(ranks(golden)):
            assert "lm_head.weight" not in theirs
            with safe_open(export(golden) / f"rank{rank}.safetensors", framework="numpy") as file:
                assert "lm_head.weight" in file.keys()  # noqa: SIM118

    @pytest.mark.parametrize("golden", [name for name in named(*AWQ) if name.startswith("llama-v257")])
    def test_awq_does_not_grow_the_vocabulary(self, export: Export, golden: str) -> None:
        """ModelOpt pads embedding and head to 320 rows of 64 and says vocab_size 320. The head is not quantized, so
        nothing needs that; but the 63 tokens that do not exist would have logit 0, and could be sampled."""
        assert their_config(golden)["vocab_size"] == 320
        folder = export(golden)
        assert config(folder)["vocab_size"] == 257
        count = len(ranks(golden))
        for name in VOCABULARY:
            shards = [load_file(folder / f"rank{rank}.safetensors")[name] for rank in range(count)]
            padded = np.concatenate(shards)[:257]
            padded = np.concatenate([padded, np.zeros((63, padded.shape[1]), padded.dtype)])
            for rank, shard in enumerate(np.split(padded, count)):
                assert hashlib.sha256(shard.tobytes()).hexdigest() == ranks(golden)[rank][name]["sha256"]

    @pytest.mark.parametrize("golden", named("w4a16nvfp4"))
    def test_hidden_size_is_not_halved(self, export: Export, golden: str) -> None:
        """ModelOpt takes hidden_size from a packed weight of two numbers a byte."""
        assert config(export(golden))["hidden_size"] == 2 * their_config(golden)["hidden_size"]

    def test_logits_are_float32(self, export: Export) -> None:
        """TensorRT-LLM's default; ModelOpt writes float16 even for bfloat16 models, where large logits overflow."""
        assert their_config("llama-bf16-TP1")["logits_dtype"] == "float16"
        assert config(export("llama-bf16-TP1"))["logits_dtype"] == "float32"

    def test_no_rank_field(self, export: Export) -> None:
        """ModelOpt's `rank` is the last one written; the loader knows its rank from the file name."""
        assert their_config("llama-bf16-TP2")["rank"] == 1
        assert "rank" not in config(export("llama-bf16-TP2"))

    def test_no_share_embedding_table(self, export: Export) -> None:
        """No config field since 0.12: sharing is decided at build time by comparing the tensors."""
        assert "share_embedding_table" in their_config("llama-tied-v257-bf16-TP1")
        ours = config(export("llama-tied-v257-bf16-TP1"))
        assert "share_embedding_table" not in ours
        assert ours["tie_word_embeddings"] is True

    def test_weight_only_keeps_plain_weights(self, export: Export) -> None:
        """ModelOpt's int8 + weights_scaling_factor lacks the per_channel_scale that the loader demands; plain weights
        are quantized by the builder itself, for its own GPU."""
        folder = export("llama-h256-bf16-TP2", Scheme("int8_wo"))
        for rank, tensors in enumerate(ranks("llama-h256-bf16-TP2")):
            assert digests(folder / f"rank{rank}.safetensors") == tensors
        assert config(folder)["quantization"]["quant_algo"] == "W8A16"
        assert config(export("llama-h256-bf16-TP1", Scheme("int4_wo")))["quantization"]["quant_algo"] == "W4A16"

    @pytest.mark.parametrize("golden", ["llama-h256-fp8kv-TP1", "llama-h256-int4awq-TP1", "llama-h256-fp8pcpt-TP1"])
    def test_excluded_modules_are_left_to_the_defaults(self, export: Export, golden: str) -> None:
        """A list such as ModelOpt's ["lm_head"] replaces the defaults: W8A16 would quantize the embedding,
        FP8_PER_CHANNEL_PER_TOKEN the last norm."""
        assert their_config(golden)["quantization"]["exclude_modules"] == ["lm_head"]
        assert config(export(golden))["quantization"]["exclude_modules"] is None

    def test_only_keys_that_every_version_knows_where_unknown_ones_are_fatal(self, export: Export) -> None:
        """`mapping` and `quantization` become keyword arguments: a key of another version is a TypeError."""
        ours = config(export("llama-h256-w4a8awq-TP2"))
        assert set(ours["mapping"]) <= {"world_size", "tp_size", "pp_size", "cp_size", "gpus_per_node"}
        assert set(ours["quantization"]) <= {
            "quant_algo",
            "kv_cache_quant_algo",
            "group_size",
            "smoothquant_val",
            "clamp_val",
            "has_zero_point",
            "pre_quant_scale",
            "exclude_modules",
        }

    def test_no_quant_cfg_file(self, export: Export) -> None:
        """ModelOpt leaves a quant_cfg.json beside unquantized exports; it is read for MIXED_PRECISION only."""
        names = sorted(file.name for file in export("llama-bf16-TP1").iterdir())
        assert names == ["config.json", "rank0.safetensors"]
