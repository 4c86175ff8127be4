"""Each way in which an edited repository can be wrong, and the file and key that the finding names."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lpxbuild.output import Output
from lpxbuild.repository import RepositorySettings, render, validate

sys.path.insert(0, str(Path(__file__).parent))
from repository_folder import configuration, make_engine


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    engine = make_engine(folder / "engine", weight_bytes=16)
    chosen = RepositorySettings(server_python="3.11", engine_python="python3")
    render(engine, folder / "repository", chosen, output=Output.quiet())
    return folder / "repository"


def edit(model: str, change: Callable[[object], None]) -> Callable[[Path], None]:
    """A mutation of one model's configuration message."""

    def mutate(repository: Path) -> None:
        from google.protobuf import text_format

        config = configuration(repository, model)
        change(config)
        (repository / model / "config.pbtxt").write_text(text_format.MessageToString(config))

    return mutate


def parameter(model: str, key: str, value: str) -> Callable[[Path], None]:
    def change(config) -> None:
        config.parameters[key].string_value = value

    return edit(model, change)


def tensor(model: str, kind: str, which: str, **fields: object) -> Callable[[Path], None]:
    """Set fields of one input or output; dims as a list."""

    def change(config) -> None:
        (message,) = [message for message in getattr(config, kind) if message.name == which]
        for field, value in fields.items():
            if field == "dims":
                message.dims[:] = value
            else:
                setattr(message, field, value)

    return edit(model, change)


def drop(model: str, kind: str, name: str) -> Callable[[Path], None]:
    def change(config) -> None:
        kept = [message for message in getattr(config, kind) if message.name != name]
        del getattr(config, kind)[:]
        getattr(config, kind).extend(kept)

    return edit(model, change)


def wire(step: int, kind: str, name: str, value: str | None) -> Callable[[Path], None]:
    """Change one entry of the ensemble's maps; None removes it."""

    def change(config) -> None:
        entries = getattr(config.ensemble_scheduling.step[step], kind)
        if value is None:
            del entries[name]
        else:
            entries[name] = value

    return edit("ensemble", change)


def setting(model: str, **fields: object) -> Callable[[Path], None]:
    return edit(model, lambda config: [setattr(config, key, value) for key, value in fields.items()])


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def mutate(repository: Path) -> None:
        text = (repository / name).read_text()
        assert old in text
        (repository / name).write_text(text.replace(old, new, 1))

    return mutate


def remove(name: str) -> Callable[[Path], None]:
    def mutate(repository: Path) -> None:
        path = repository / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return mutate


def engine_limit(**limits: int) -> Callable[[Path], None]:
    def mutate(repository: Path) -> None:
        path = repository / "tensorrt_llm/1/engine/engine.json"
        data = json.loads(path.read_text())
        data["limits"].update(limits)
        path.write_text(json.dumps(data))

    return mutate


def decoupled(model: str, value: bool) -> Callable[[Path], None]:
    return edit(model, lambda config: setattr(config.model_transaction_policy, "decoupled", value))


LLM, PRE, POST, ENS, BLS = (
    f"{model}/config.pbtxt"
    for model in ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls")
)

# (mutation, file, key, a word of the message)
CASES = {
    # files
    "member gone": (remove("postprocessing"), POST, "", "missing"),
    "bls without config": (remove("tensorrt_llm_bls/config.pbtxt"), BLS, "", "missing"),
    "model.py gone": (remove("preprocessing/1/model.py"), "preprocessing/1/model.py", "", "missing"),
    "ensemble version gone": (remove("ensemble/1"), "ensemble/1", "", "version folder"),
    "unknown field": (replace(PRE, 'name: "preprocessing"', "max_inflight: 3"), PRE, "", "max_inflight"),
    "not UTF-8": (lambda repo: (repo / PRE).write_bytes(b"\xff\xfe"), PRE, "", "parse"),
    "unfilled number": (replace(LLM, "max_batch_size: 8", "max_batch_size: ${size}"), LLM, "line 2", "template field"),
    "unfilled text": (parameter("preprocessing", "tokenizer_dir", "${tokenizer_dir}"), PRE, "tokenizer_dir", "exist"),
    # names and kinds
    "name": (setting("preprocessing", name="pre"), PRE, "name", "'pre'"),
    "backend": (setting("tensorrt_llm", backend="tensorrtllm"), LLM, "backend", "tensorrtllm"),
    "platform": (setting("ensemble", platform=""), ENS, "platform", "ensemble"),
    "newer field": (edit("ensemble", lambda c: c.model_metrics.SetInParent()), ENS, "model_metrics", "2.51"),
    "response cache": (
        edit("tensorrt_llm", lambda c: setattr(c.response_cache, "enable", True)),
        LLM,
        "response_cache",
        "streaming",
    ),
    # tensors
    "old seed name": (tensor("tensorrt_llm", "input", "seed", name="random_seed"), LLM, "input seed", "missing"),
    "misspelt input": (tensor("tensorrt_llm", "input", "seed", name="sed"), LLM, "input sed", "meant seed?"),
    "type": (
        tensor("tensorrt_llm", "input", "temperature", data_type=12),
        LLM,
        "input temperature",
        "FP64, must be FP32",
    ),
    "shape": (tensor("preprocessing", "output", "STOP_WORDS_IDS", dims=[-1]), PRE, "output STOP_WORDS_IDS", "[2, -1]"),
    "now required": (tensor("tensorrt_llm", "input", "stop", optional=False), LLM, "input stop", "optional is False"),
    "not ragged": (
        tensor("tensorrt_llm", "input", "input_ids", allow_ragged_batch=False),
        LLM,
        "input input_ids",
        "ragged",
    ),
    "output lost": (drop("ensemble", "output", "num_output_tokens"), ENS, "output num_output_tokens", "missing"),
    "input twice": (
        edit("ensemble", lambda c: c.input.add().CopyFrom(c.input[0])),
        ENS,
        "input text_input",
        "twice",
    ),
    # parameters
    "bool word": (
        parameter("preprocessing", "add_special_tokens", "maybe"),
        PRE,
        "add_special_tokens",
        "true or false",
    ),
    "bool case": (parameter("postprocessing", "skip_special_tokens", "True"), POST, "skip_special_tokens", "'True'"),
    "number with tail": (parameter("tensorrt_llm", "max_beam_width", "12abc"), LLM, "max_beam_width", "12abc"),
    "number zero": (parameter("tensorrt_llm", "max_beam_width", "0"), LLM, "max_beam_width", "at least 1"),
    "number sign": (parameter("tensorrt_llm", "max_beam_width", "+1"), LLM, "max_beam_width", "'+1'"),
    "other digits": (parameter("tensorrt_llm", "max_beam_width", "١"), LLM, "max_beam_width", "whole number"),
    "absolute folder": (parameter("preprocessing", "tokenizer_dir", "/tmp"), PRE, "tokenizer_dir", "relative"),
    "folder outside": (parameter("tensorrt_llm", "gpt_model_path", "../x"), LLM, "gpt_model_path", "inside"),
    "empty folder name": (parameter("tensorrt_llm", "gpt_model_path", ""), LLM, "gpt_model_path", "relative"),
    "folder absent": (
        parameter("postprocessing", "tokenizer_dir", "vocabulary"),
        POST,
        "tokenizer_dir",
        "'vocabulary'",
    ),
    "python absent": (parameter("tensorrt_llm", "engine_python", "/no/python"), LLM, "engine_python", "/no/python"),
    "model absent": (
        parameter("tensorrt_llm_bls", "tensorrt_llm_model_name", "llm"),
        BLS,
        "tensorrt_llm_model_name",
        "'llm'",
    ),
    "parameter gone": (
        edit("preprocessing", lambda c: c.parameters.pop("add_special_tokens")),
        PRE,
        "add_special_tokens",
        "missing",
    ),
    "unknown parameter": (
        parameter("tensorrt_llm", "max_beam_with", "1"),
        LLM,
        "max_beam_with",
        "meant max_beam_width?",
    ),
    # batching and instances
    "no batch": (setting("preprocessing", max_batch_size=0), PRE, "max_batch_size", "at least 1"),
    "small member": (setting("postprocessing", max_batch_size=2), ENS, "max_batch_size", "no more than 2"),
    "small member, bls": (setting("postprocessing", max_batch_size=2), BLS, "max_batch_size", "no more than 2"),
    "large ensemble": (setting("ensemble", max_batch_size=9), ENS, "max_batch_size", "is 9"),
    "preferred size": (
        edit("tensorrt_llm", lambda c: c.dynamic_batching.preferred_batch_size.append(99)),
        LLM,
        "dynamic_batching",
        "99",
    ),
    "stream order": (
        edit("postprocessing", lambda c: setattr(c.dynamic_batching, "preserve_ordering", False)),
        POST,
        "dynamic_batching",
        "change places",
    ),
    "no instance": (
        edit("preprocessing", lambda c: setattr(c.instance_group[0], "count", 0)),
        PRE,
        "instance_group",
        "count",
    ),
    "on a GPU": (
        edit("tensorrt_llm", lambda c: setattr(c.instance_group[0], "kind", 1)),
        LLM,
        "instance_group",
        "KIND_CPU",
    ),
    "ensemble instance": (
        edit("ensemble", lambda c: c.instance_group.add(count=1)),
        ENS,
        "instance_group",
        "no instances",
    ),
    # streaming
    "pre decoupled": (decoupled("preprocessing", True), PRE, "decoupled", "once"),
    "bls not decoupled": (decoupled("tensorrt_llm_bls", False), BLS, "decoupled", "is false, tensorrt_llm has true"),
    "beams with streaming": (parameter("tensorrt_llm", "max_beam_width", "4"), LLM, "max_beam_width", "streaming"),
    # engine
    "engine smaller": (engine_limit(max_batch_size=4), LLM, "max_batch_size", "is 8, the engine was built for 4"),
    "beams of engine": (parameter("tensorrt_llm", "max_beam_width", "5"), LLM, "max_beam_width", "built for 4"),
    "engine.json gone": (remove("tensorrt_llm/1/engine/engine.json"), LLM, "gpt_model_path", "engine.json"),
    "engine.json cut": (
        lambda repo: (repo / "tensorrt_llm/1/engine/engine.json").write_text("{"),
        LLM,
        "gpt_model_path",
        "cannot be read",
    ),
    "weights gone": (remove("tensorrt_llm/1/engine/openvino_model.bin"), LLM, "gpt_model_path", "openvino_model.bin"),
    "other engine": (
        replace("tensorrt_llm/1/engine/engine.json", '"openvino"', '"other"'),
        LLM,
        "gpt_model_path",
        "backend other",
    ),
    # tokenizers
    "tokenizer.json gone": (remove("preprocessing/1/tokenizer/tokenizer.json"), PRE, "tokenizer_dir", "tokenizer.json"),
    "two tokenizers": (
        lambda repo: (repo / "postprocessing/1/tokenizer/tokenizer.json").write_text("{}"),
        POST,
        "tokenizer_dir",
        "another tokenizer than preprocessing",
    ),
    # wiring
    "no steps": (
        edit("ensemble", lambda c: c.ensemble_scheduling.ClearField("step")),
        ENS,
        "ensemble_scheduling",
        "no steps",
    ),
    "step unknown": (
        edit("ensemble", lambda c: setattr(c.ensemble_scheduling.step[2], "model_name", "decode")),
        ENS,
        "step decode",
        "no such model",
    ),
    "required unmapped": (wire(0, "input_map", "QUERY", None), ENS, "step preprocessing", "QUERY is not mapped"),
    "made by nothing": (
        wire(1, "input_map", "input_ids", "_INPUT_IDS"),
        ENS,
        "step tensorrt_llm",
        "_INPUT_IDS (for input_ids)",
    ),
    "no such input": (wire(1, "input_map", "top_k", "top_k"), ENS, "step tensorrt_llm", "no input top_k"),
    "no such output": (wire(1, "output_map", "text", "_TEXT"), ENS, "step tensorrt_llm", "no output text"),
    "made twice": (
        wire(1, "output_map", "batch_index", "_INPUT_ID"),
        ENS,
        "step tensorrt_llm",
        "already made by preprocessing",
    ),
    "output of nobody": (wire(2, "output_map", "OUTPUT", "text"), ENS, "output text_output", "made by no step"),
    "used by nobody": (wire(1, "input_map", "seed", None), ENS, "seed", "used by nothing"),
    "types differ": (
        wire(1, "input_map", "runtime_top_k", "temperature"),
        ENS,
        "step tensorrt_llm",
        "runtime_top_k is INT32",
    ),
    "shapes differ": (
        wire(1, "input_map", "stop_words_list", "_INPUT_ID"),
        ENS,
        "step tensorrt_llm",
        "stop_words_list has shape",
    ),
}


def test_the_unchanged_repository_has_no_findings(good: Path) -> None:
    assert validate(good) == []


@pytest.mark.parametrize("case", CASES)
def test_finding_names_file_and_key(good: Path, tmp_path: Path, case: str) -> None:
    mutate, file, key, word = CASES[case]
    shutil.copytree(good, tmp_path / "r")
    mutate(tmp_path / "r")
    findings = validate(tmp_path / "r")
    assert [
        finding for finding in findings if (finding.file, finding.key) == (file, key) and word in finding.message
    ], f"not among: {[str(finding) for finding in findings]}"


def test_template_field_in_a_shipped_file_is_found_with_its_line(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "r")
    model = tmp_path / "r/postprocessing/1/model.py"
    model.write_text("first = 1\nsecond = '${tokenizer_dir}'\n")
    (finding,) = validate(tmp_path / "r")
    assert str(finding) == (
        "postprocessing/1/model.py: line 2: a template field is not filled: second = '${tokenizer_dir}'"
    )


def test_one_unreadable_model_does_not_bury_the_cause(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "r")
    (tmp_path / "r" / LLM).write_text("name: 'tensorrt_llm' max_batch_size: eight")
    assert [(finding.file, finding.key) for finding in validate(tmp_path / "r")] == [
        (LLM, ""),
        (ENS, "step tensorrt_llm"),
    ]


def test_all_findings_are_reported_together(good: Path, tmp_path: Path) -> None:
    shutil.copytree(good, tmp_path / "r")
    parameter("preprocessing", "add_special_tokens", "yes")(tmp_path / "r")
    parameter("postprocessing", "skip_special_tokens", "no")(tmp_path / "r")
    assert [(finding.file, finding.key) for finding in validate(tmp_path / "r")] == [
        (PRE, "add_special_tokens"),
        (POST, "skip_special_tokens"),
    ]


def test_an_empty_folder(tmp_path: Path) -> None:
    assert [finding.file for finding in validate(tmp_path)] == [PRE, LLM, POST, ENS]
