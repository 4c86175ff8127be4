"""Unquantized checkpoints bit for bit against NVIDIA ModelOpt, and each difference of config.json with its reason."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lpxbuild.checkpoint import convert
from lpxbuild.output import Output
from lpxbuild.source import check

ORACLE = Path(__file__).parent / "oracle"
MODELS = ("llama", "llama-bias", "llama-v257", "llama-tied-v257", "llama-h256", "mistral-h256", "qwen2")
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
Export = Callable[..., Path]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Export:
    def run(model: str, dtype: str, tensor_parallel: int, quantization_format: str = "none") -> Path:
        source = check(
            ORACLE / "in" / model,
            origin=model,
            need_tokenizer=False,
            tensor_parallel=tensor_parallel,
            output=Output.quiet(),
        )
        destination = tmp_path_factory.mktemp(model) / "checkpoint"
        convert(
            source,
            destination,
            dtype=DTYPES[dtype],
            tensor_parallel=tensor_parallel,
            quantization_format=quantization_format,
            output=Output.quiet(),
        )
        return destination

    return run


def golden(model: str, dtype: str, tensor_parallel: int) -> dict[str, Any]:
    return json.loads((ORACLE / "golden" / f"{model}-{dtype}-TP{tensor_parallel}.json").read_text())


def config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def digests(file: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and SHA-256 of each tensor, read by the format's description (u64 length, JSON, data)."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(data[8 + length + begin : 8 + length + end]).hexdigest()
            found[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest}
    return found


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_has_the_bits_of_modelopt(export: Export, model: str, dtype: str, tensor_parallel: int) -> None:
    folder = export(model, dtype, tensor_parallel)
    expected = golden(model, dtype, tensor_parallel)["ranks"]
    assert sorted(file.name for file in folder.glob("*.safetensors")) == [
        f"rank{r}.safetensors" for r in range(len(expected))
    ]
    for rank, tensors in enumerate(expected):
        assert digests(folder / f"rank{rank}.safetensors") == tensors


@pytest.mark.parametrize("model", MODELS)
def test_safetensors_own_reader_opens_the_files(export: Export, model: str) -> None:
    folder = export(model, "fp16", 2)
    for rank, tensors in enumerate(golden(model, "fp16", 2)["ranks"]):
        with safe_open(folder / f"rank{rank}.safetensors", framework="numpy") as file:
            assert set(file.keys()) == set(tensors)


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_config_fields_that_modelopt_writes_rightly(export: Export, model: str, tensor_parallel: int) -> None:
    ours, theirs = config(export(model, "bf16", tensor_parallel)), golden(model, "bf16", tensor_parallel)["config"]
    for key in (
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
        "rotary_base",
    ):
        assert ours[key] == theirs[key], key
    for key, value in theirs["mapping"].items():
        assert ours["mapping"][key] == value
    assert ours["quantization"]["quant_algo"] is None
    assert ours["quantization"]["kv_cache_quant_algo"] is None


class TestDeliberateDifferences:
    """Where the export is wrong or says nothing, with the reason."""

    def test_biases_have_trtllms_names(self, export: Export) -> None:
        """ModelOpt writes only `bias: true`, which LLaMAConfig does not read: the biases would not be loaded."""
        assert golden("llama-bias", "bf16", 1)["config"]["bias"] is True
        ours = config(export("llama-bias", "bf16", 1))
        assert (ours["attn_bias"], ours["mlp_bias"]) == (True, True)
        assert "bias" not in ours
        plain = config(export("llama", "bf16", 1))
        assert (plain["attn_bias"], plain["mlp_bias"]) == (False, False)

    def test_qwen_has_the_fields_its_class_reads(self, export: Export) -> None:
        """QWenConfig needs qwen_type and seq_length (no default), and attn_bias for the q, k, v biases."""
        theirs, ours = golden("qwen2", "bf16", 1)["config"], config(export("qwen2", "bf16", 1))
        assert not {"qwen_type", "seq_length", "attn_bias"} & set(theirs)
        assert (ours["qwen_type"], ours["seq_length"], ours["attn_bias"]) == ("qwen2", 8192, True)
        assert ours["mlp_bias"] is False

    def test_logits_are_float32(self, export: Export) -> None:
        """TensorRT-LLM's default; ModelOpt writes float16 even for bfloat16 models, where large logits overflow."""
        assert golden("llama", "bf16", 1)["config"]["logits_dtype"] == "float16"
        assert config(export("llama", "bf16", 1))["logits_dtype"] == "float32"

    def test_no_rank_field(self, export: Export) -> None:
        """ModelOpt's `rank` is the last one written; the loader knows its rank from the file name."""
        assert golden("llama", "bf16", 2)["config"]["rank"] == 1
        assert "rank" not in config(export("llama", "bf16", 2))

    def test_no_share_embedding_table(self, export: Export) -> None:
        """No config field since 0.12: sharing is decided at build time by comparing the tensors."""
        assert "share_embedding_table" in golden("llama-tied-v257", "bf16", 1)["config"]
        ours = config(export("llama-tied-v257", "bf16", 1))
        assert "share_embedding_table" not in ours
        assert ours["tie_word_embeddings"] is True

    def test_weight_only_keeps_plain_weights(self, export: Export) -> None:
        """ModelOpt's int8 + weights_scaling_factor lacks the per_channel_scale that the loader demands; plain weights
        are quantized by the builder itself, for its own GPU."""
        folder = export("llama-h256", "bf16", 2, "int8_wo")
        for rank, tensors in enumerate(golden("llama-h256", "bf16", 2)["ranks"]):
            assert digests(folder / f"rank{rank}.safetensors") == tensors
        assert config(folder)["quantization"]["quant_algo"] == "W8A16"
        assert config(export("llama-h256", "bf16", 1, "int4_wo"))["quantization"]["quant_algo"] == "W4A16"

    def test_excluded_modules_are_left_to_the_defaults(self, export: Export) -> None:
        """A list such as ModelOpt's ["lm_head"] replaces the defaults: with W8A16 the embedding would be quantized."""
        assert config(export("llama-h256", "bf16", 1, "int8_wo"))["quantization"]["exclude_modules"] is None

    def test_only_keys_that_every_version_knows_where_unknown_ones_are_fatal(self, export: Export) -> None:
        """`mapping` and `quantization` become keyword arguments: a key of another version is a TypeError."""
        ours = config(export("qwen2", "bf16", 2))
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
        names = sorted(file.name for file in export("llama", "bf16", 1).iterdir())
        assert names == ["config.json", "rank0.safetensors"]
