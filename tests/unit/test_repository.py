"""Rendering: official tensors, wiring, sharing of files, and the same bytes each time."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import pytest

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import stages
from lpxbuild.repository import RepositorySettings, render, validate

sys.path.insert(0, str(Path(__file__).parent))
from repository_folder import LIMITS, configuration, make_engine

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine(tmp_path / "engine")


def settings(**changes: object) -> RepositorySettings:
    return RepositorySettings(**{"server_python": "3.11", **changes})  # type: ignore[arg-type]


def official() -> dict[tuple[str, str], dict[str, tuple]]:
    """(model, "in"|"out") -> name -> (dtype, dims, optional, reshape, ragged), from repository_official.txt."""
    table: dict[tuple[str, str], dict[str, tuple]] = defaultdict(dict)
    for line in (Path(__file__).parent / "repository_official.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        head, _, names = line.removeprefix("lpx:").partition(":")
        models, direction, data_type, shape, *flags = head.split()
        dims = tuple(int(size) for size in shape.split(","))
        row = (data_type, dims, "opt" in flags, () if "R" in flags else None, "ragged" in flags)
        for model in models.split(","):
            for name in names.split():
                assert name not in table[model, direction], f"{model} {name} is written down twice"
                table[model, direction][name] = row
    return table


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_the_official_ones(engine: Path, tmp_path: Path, model: str, direction: str) -> None:
    render(engine, tmp_path / "repository", settings(), output=Output.quiet())
    from tritonclient.grpc import model_config_pb2

    config = configuration(tmp_path / "repository", model)
    found = {
        tensor.name: (
            model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"),
            tuple(tensor.dims),
            direction == "in" and tensor.optional,
            tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
            direction == "in" and tensor.allow_ragged_batch,
        )
        for tensor in (config.input if direction == "in" else config.output)
    }
    assert found == official()[model, direction]


def test_counts_of_the_published_files() -> None:
    """Counted in NVIDIA's files, so that a row lost in the transcription shows."""
    counts = {key: len(rows) for key, rows in official().items()}
    assert counts == {
        ("preprocessing", "in"): 14,
        ("preprocessing", "out"): 20,
        ("tensorrt_llm", "in"): 62,
        ("tensorrt_llm", "out"): 21 + 1,
        ("postprocessing", "in"): 2 + 1,
        ("postprocessing", "out"): 1,
        ("ensemble", "in"): 36,
        ("ensemble", "out"): 19,
        ("tensorrt_llm_bls", "in"): 36 + 6,
        ("tensorrt_llm_bls", "out"): 19,
    }


def test_settings_reach_the_files(engine: Path, tmp_path: Path) -> None:
    chosen = settings(
        max_batch_size=4,
        max_queue_delay_microseconds=150,
        max_queue_size=32,
        preprocessing_instances=2,
        postprocessing_instances=3,
        tensorrt_llm_instances=1,
        bls_instances=5,
        engine_python="python3",
        add_special_tokens=False,
        skip_special_tokens=False,
    )
    render(engine, tmp_path / "r", chosen, output=Output.quiet())
    configs = {model: configuration(tmp_path / "r", model) for model in MODELS}
    assert {model: config.max_batch_size for model, config in configs.items()} == dict.fromkeys(MODELS, 4)
    assert {model: [group.count for group in config.instance_group] for model, config in configs.items()} == {
        "preprocessing": [2],
        "tensorrt_llm": [1],
        "postprocessing": [3],
        "ensemble": [],
        "tensorrt_llm_bls": [5],
    }
    for model in ("preprocessing", "tensorrt_llm"):
        batching = configs[model].dynamic_batching
        assert list(batching.preferred_batch_size) == [4]
        assert batching.max_queue_delay_microseconds == 150
        assert batching.default_queue_policy.max_queue_size == 32
    assert configs["postprocessing"].dynamic_batching.preserve_ordering
    assert not configs["tensorrt_llm_bls"].HasField("dynamic_batching")
    parameters = {
        model: {key: value.string_value for key, value in config.parameters.items()}
        for model, config in configs.items()
    }
    assert parameters == {
        "preprocessing": {"tokenizer_dir": "tokenizer", "add_special_tokens": "false"},
        "tensorrt_llm": {
            "gpt_model_path": "engine",
            "tokenizer_dir": "tokenizer",
            "engine_python": "python3",
            "skip_special_tokens": "false",
            "exclude_input_in_output": "false",
            "max_beam_width": "1",
        },
        "postprocessing": {"tokenizer_dir": "tokenizer", "skip_special_tokens": "false"},
        "ensemble": {},
        "tensorrt_llm_bls": {"accumulate_tokens": "false", "tensorrt_llm_model_name": "tensorrt_llm"},
    }


def test_every_setting_comes_from_the_recipe() -> None:
    """All but the Python of the server, which the host decides."""
    (call,) = [
        node
        for node in ast.walk(ast.parse(Path(stages.__file__).read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "RepositorySettings"
    ]
    given = {keyword.arg for keyword in call.keywords}
    assert given == {field.name for field in fields(RepositorySettings)} - {"server_python"}


@pytest.mark.parametrize("decoupled", [True, False])
def test_streaming_decides_decoupled_everywhere(engine: Path, tmp_path: Path, decoupled: bool) -> None:
    render(engine, tmp_path / "r", settings(decoupled=decoupled), output=Output.quiet())
    found = {model: configuration(tmp_path / "r", model).model_transaction_policy.decoupled for model in MODELS}
    # The ensemble has no policy of its own: Triton derives it from its steps.
    assert found == {
        "preprocessing": False,
        "tensorrt_llm": decoupled,
        "postprocessing": False,
        "ensemble": False,
        "tensorrt_llm_bls": decoupled,
    }


def test_ensemble_wiring(engine: Path, tmp_path: Path) -> None:
    render(engine, tmp_path / "r", settings(), output=Output.quiet())
    first, second, third = configuration(tmp_path / "r", "ensemble").ensemble_scheduling.step
    assert [step.model_name for step in (first, second, third)] == ["preprocessing", "tensorrt_llm", "postprocessing"]
    assert dict(first.input_map) == {
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    }
    renamed = {
        "input_ids": "_INPUT_ID",
        "decoder_input_ids": "_DECODER_INPUT_ID",
        "input_lengths": "_REQUEST_INPUT_LEN",
        "decoder_input_lengths": "_REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "_REQUEST_OUTPUT_LEN",
        "end_id": "_PREPROCESSOR_END_ID",
        "pad_id": "_PREPROCESSOR_PAD_ID",
        "embedding_bias": "_EMBEDDING_BIAS",
        "stop_words_list": "_STOP_WORDS_IDS",
        "bad_words_list": "_BAD_WORDS_IDS",
        "prompt_table_extra_ids": "_OUT_PROMPT_TABLE_EXTRA_IDS",
        "runtime_top_k": "top_k",
        "runtime_top_p": "top_p",
        "len_penalty": "length_penalty",
        "streaming": "stream",
    }
    same = """temperature repetition_penalty min_tokens presence_penalty frequency_penalty seed return_log_probs
        return_context_logits return_generation_logits return_perf_metrics return_num_input_tokens
        return_num_output_tokens num_return_sequences beam_width exclude_input_in_output prompt_embedding_table
        prompt_vocab_size lora_task_id lora_weights lora_config guided_decoding_guide_type guided_decoding_guide"""
    assert dict(second.input_map) == renamed | {name: name for name in same.split()}
    assert {key: value for key, value in second.output_map.items() if key != value} == {
        "output_ids": "_TOKENS_BATCH",
        "sequence_length": "_SEQUENCE_LENGTH",
        "output_text": "_OUTPUT_TEXT",
    }
    assert dict(third.input_map) == {
        "TOKENS_BATCH": "_TOKENS_BATCH",
        "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH",
        "OUTPUT_TEXT": "_OUTPUT_TEXT",
    }
    assert dict(third.output_map) == {"OUTPUT": "text_output"}


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_same_inputs_same_bytes_and_no_path_of_this_machine(engine: Path, tmp_path: Path) -> None:
    render(engine, tmp_path / "one", settings(), output=Output.quiet())
    render(engine, tmp_path / "elsewhere" / "two", settings(), output=Output.quiet())
    one = tree(tmp_path / "one")
    assert one == tree(tmp_path / "elsewhere" / "two")
    assert [name for name, content in one.items() if str(tmp_path).encode() in content] == []


def test_large_files_are_shared_and_protected_small_ones_copied(engine: Path, tmp_path: Path) -> None:
    report = render(engine, tmp_path / "r", settings(), output=Output.quiet())
    weights = tmp_path / "r/tensorrt_llm/1/engine/openvino_model.bin"
    assert report.shared_bytes in (3 << 20, 0)  # 0: a file system without links
    assert not os.access(weights, os.W_OK) or os.getuid() == 0
    assert weights.stat().st_mode & 0o222 == 0
    small = tmp_path / "r/tensorrt_llm/1/engine/engine.json"
    assert small.stat().st_ino != (engine / "engine.json").stat().st_ino
    small.write_text("{}")
    assert json.loads((engine / "engine.json").read_text())["backend"] == "openvino"
    assert not (tmp_path / "r/tensorrt_llm/1/engine/tokenizer").exists()
    for model in ("preprocessing", "tensorrt_llm", "postprocessing"):
        assert tree(tmp_path / "r" / model / "1/tokenizer") == tree(engine / "tokenizer")


def test_a_copy_elsewhere_is_valid_without_the_original(engine: Path, tmp_path: Path) -> None:
    render(engine, tmp_path / "r", settings(), output=Output.quiet())
    shutil.copytree(tmp_path / "r", tmp_path / "copy")
    shutil.rmtree(tmp_path / "r")
    shutil.rmtree(engine)
    assert validate(tmp_path / "copy") == []


def test_bls_is_left_out_on_other_pythons_and_said(engine: Path, tmp_path: Path) -> None:
    output = Output.quiet()
    report = render(engine, tmp_path / "r", settings(server_python="3.12"), output=output)
    assert "tensorrt_llm_bls" not in report.models
    assert not (tmp_path / "r/tensorrt_llm_bls").exists()
    assert len(output.notices) == 1
    assert "3.12" in output.notices[0]
    assert "3.11" in output.notices[0]


def test_bls_not_wished_needs_no_notice(engine: Path, tmp_path: Path) -> None:
    output = Output.quiet()
    report = render(engine, tmp_path / "r", settings(bls=False), output=output)
    assert report.models == ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")
    assert output.notices == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backend": "vllm"}, ["vllm", "openvino"]),
        ({"max_batch_size": 0}, ["max_batch_size", "0"]),
        ({"bls_instances": 0}, ["bls_instances", "0"]),
        ({"max_queue_size": -1}, ["max_queue_size", "-1"]),
        ({"max_beam_width": 4, "decoupled": True}, ["beam", "4", "streaming"]),
    ],
)
def test_settings_that_would_fail_later_are_refused(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        settings(**changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_batch_size": 16}, ["max_batch_size", "16", "8"]),
        ({"max_beam_width": 5, "decoupled": False}, ["max_beam_width", "5", "4"]),
        ({"engine_python": "/no/such/python"}, ["runtime.python", "/no/such/python"]),
        ({"engine_python": "bin/python"}, ["runtime.python", "bin/python", "absolute"]),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_writing(
    engine: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        render(engine, tmp_path / "r", settings(**changes), output=Output.quiet())
    assert [word for word in words if word not in str(caught.value)] == []
    assert not (tmp_path / "r").exists()


def test_no_tokenizer_no_repository(engine: Path, tmp_path: Path) -> None:
    shutil.rmtree(engine / "tokenizer")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        render(engine, tmp_path / "r", settings(), output=Output.quiet())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "engine.json"),
        ("{", "cannot be read"),
        ("[]", "no backend and limits"),
        (json.dumps({"backend": "tensorrt", "limits": LIMITS}), "backend tensorrt"),
    ],
)
def test_damaged_engine(engine: Path, tmp_path: Path, content: str | None, words: str) -> None:
    if content is None:
        (engine / "engine.json").unlink()
    else:
        (engine / "engine.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        render(engine, tmp_path / "r", settings(), output=Output.quiet())


def test_files_of_the_user_are_not_overwritten(engine: Path, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        render(engine, tmp_path / "r", settings(), output=Output.quiet())
    assert tree(tmp_path / "r") == {"notes.txt": b"mine"}
