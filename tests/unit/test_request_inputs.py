"""Row by row: what the table says about an input of tensorrt_llm is what the model's code does with it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

np = pytest.importorskip("numpy")

from lpxbuild.repository import request_inputs_table  # noqa: E402
from lpxbuild.repository.tensors import RequestInput, ensemble_steps, interface, request_inputs  # noqa: E402
from lpxbuild.shipped import shipped  # noqa: E402

ROWS = {row.name: row for row in request_inputs()}
HONOURED = [name for name, row in ROWS.items() if row.honoured_by("openvino")]
REFUSED = [name for name in ROWS if name not in HONOURED]

TYPES: dict[str, Any] = {
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "BOOL": np.bool_,
    "STRING": np.object_,
}


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    """The module of tensorrt_llm that reads requests, with its neighbours side by side as in its version folder."""
    before = set(sys.modules)
    folders = [str(shipped("model_repo") / name) for name in ("tensorrt_llm", "text")]
    sys.path[:0] = folders
    try:
        yield importlib.import_module("request_inputs")
    finally:
        for folder in folders:
            sys.path.remove(folder)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(tuple(folders)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def table(model: ModuleType) -> Any:
    return model.InputTable(shipped("model_repo") / "tensorrt_llm" / "tensors.json", "openvino")


@pytest.fixture(scope="module")
def vocabulary(model: ModuleType) -> Any:
    """Ids 0 to 9 are the letters a to j, 10 is a special token."""
    letters = {letter: index for index, letter in enumerate("abcdefghij")}
    return model.Vocabulary(
        {
            "model": {"vocab": letters},
            "added_tokens": [{"id": 10, "content": "<|end|>", "special": True}],
            "decoder": {"type": "ByteLevel"},
        }
    )


@pytest.fixture(scope="module")
def limits(model: ModuleType) -> Any:
    return model.EngineLimits(
        max_batch_size=8, max_input_len=32, max_seq_len=64, max_beam_width=4, vocab_size=11, end_ids=(10,), pad_id=10
    )


def request(**changes: Any) -> dict[str, Any]:
    """The smallest request, one row, and `changes`; scalars arrive as [1] because of the reshape."""
    tensors = {
        "input_ids": np.array([[0, 1, 2]], np.int32),
        "input_lengths": np.array([3], np.int32),
        "request_output_len": np.array([5], np.int32),
    }
    return tensors | changes


def tensor(row: RequestInput, value: object, count: int = 1) -> Any:
    """`count` elements of the row's type, in a shape that it allows."""
    if not row.dims or row.reshape == ():
        return np.array([value], TYPES[row.data_type])
    fixed = [size if size > 0 else 1 for size in row.dims]
    fixed[-1] = count if row.dims[-1] < 0 else fixed[-1]
    return np.full([1, *fixed], value, TYPES[row.data_type])


def meaningful(row: RequestInput) -> object:
    """A value that asks for something: none of the neutral ones."""
    return {"BOOL": True, "STRING": b"json"}.get(row.data_type, 3)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_with_the_backends_that_honour_it(model: ModuleType, table: Any, name: str) -> None:
    row = ROWS[name]
    with pytest.raises(model.RequestError) as caught:
        table.check(request(**{name: tensor(row, meaningful(row))}))
    message = str(caught.value)
    assert name in message
    assert "openvino" in message
    for backend, verdict in (row.backends or {}).items():
        assert (backend in message.replace("backend openvino", "")) == verdict.startswith("honoured")
    if row.client not in (None, name):
        assert str(row.client) in message  # the name by which the ensemble's user knows it


@pytest.mark.parametrize("name", REFUSED)
def test_refused_inputs_pass_when_they_ask_for_nothing(table: Any, name: str) -> None:
    row = ROWS[name]
    table.check(request(**{name: np.zeros([1, 0], TYPES[row.data_type])}))
    for value in row.neutral:
        sent = 7 if value == "pad_id" else value.encode() if isinstance(value, str) else value
        table.check(request(**{"pad_id": np.array([7], np.int32), name: tensor(row, sent, count=4)}))


def test_one_meaningful_element_among_neutral_ones_is_refused(model: ModuleType, table: Any) -> None:
    bias = np.zeros([1, 11], np.float32)
    table.check(request(embedding_bias=bias))
    bias[0, 4] = 0.5
    with pytest.raises(model.RequestError, match="embedding_bias_words"):
        table.check(request(embedding_bias=bias))


def test_decoder_input_other_than_the_pad_id_is_refused(model: ModuleType, table: Any) -> None:
    with pytest.raises(model.RequestError, match="decoder_text_input"):
        table.check(request(pad_id=np.array([7], np.int32), decoder_input_ids=np.array([[8]], np.int32)))


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        (np.zeros([1, 2, 0], np.int32), True),  # no list
        (np.array([[[0], [-1]]], np.int32), True),  # bad_words [""]: the official padding
        (np.array([[[0, 0], [-1, -1]]], np.int32), True),
        (np.array([[[0], [1]]], np.int32), False),  # the word of the one id 0
        (np.array([[[5, 0], [1, -1]]], np.int32), False),
    ],
)
def test_bad_words_pass_only_when_there_are_none(model: ModuleType, table: Any, words: Any, passes: bool) -> None:
    if passes:
        table.check(request(bad_words_list=words))
    else:
        with pytest.raises(model.RequestError, match="bad_words"):
            table.check(request(bad_words_list=words))


# Honoured input -> (value sent, where its effect shows, what must be there). "message": what the engine is asked;
# "row": how the row is answered; "options": how the answer is shown. Beside the value go the tensors in `WITH`.
EFFECTS: dict[str, tuple[Any, str, str, Any]] = {
    "input_ids": (np.array([[4, 5, 6]], np.int32), "row", "prompt", [4, 5, 6]),
    "input_lengths": (np.array([2], np.int32), "row", "prompt", [0, 1]),
    "request_output_len": (np.array([9], np.int32), "row", "max_tokens", 9),
    "num_return_sequences": (np.array([3], np.int32), "row", "sequences", 3),
    "end_id": (np.array([4], np.int32), "message", "end_ids", [4, 10]),
    "pad_id": (np.array([6], np.int32), "options", "pad_id", 6),
    "stop_words_list": (np.array([[[1, 2, 3], [2, 3, -1]]], np.int32), "row", "stop_words", ("bc", "d")),
    "beam_width": (np.array([2], np.int32), "row", "beam_width", 2),
    "temperature": (np.array([0.5], np.float32), "message", "temperature", 0.5),
    "runtime_top_k": (np.array([7], np.int32), "message", "top_k", 7),
    "runtime_top_p": (np.array([0.5], np.float32), "message", "top_p", 0.5),
    "len_penalty": (np.array([2.0], np.float32), "message", "length_penalty", 2.0),
    "early_stopping": (np.array([True]), "message", "early_stopping", True),
    "repetition_penalty": (np.array([1.5], np.float32), "message", "repetition_penalty", 1.5),
    "min_tokens": (np.array([2], np.int32), "message", "min_tokens", 2),
    "presence_penalty": (np.array([0.25], np.float32), "message", "presence_penalty", 0.25),
    "frequency_penalty": (np.array([0.75], np.float32), "message", "frequency_penalty", 0.75),
    "seed": (np.array([2**63 + 5], np.uint64), "message", "seed", 2**63 + 5),
    "return_log_probs": (np.array([True]), "options", "log_probs", True),
    "return_perf_metrics": (np.array([True]), "options", "perf_metrics", True),
    "return_num_input_tokens": (np.array([True]), "options", "num_input_tokens", True),
    "return_num_output_tokens": (np.array([True]), "options", "num_output_tokens", True),
    "exclude_input_in_output": (np.array([True]), "options", "exclude_input", True),
    "streaming": (np.array([True]), "options", "streaming", True),
}


def test_every_honoured_row_has_a_test_of_its_effect() -> None:
    # `stop` never reaches the engine: the model ends other requests by it, tested with the real server.
    assert sorted({*EFFECTS, "stop"}) == sorted(HONOURED)


def effect(model: ModuleType, tensors: dict[str, Any], where: str, key: str, limits: Any, vocabulary: Any) -> Any:
    if where == "options":
        return getattr(model.read_options(tensors, exclude_input=False, pad_id=limits.pad_id), key)
    (row,) = model.read_rows(tensors, limits, vocabulary)
    return row.message.get(key) if where == "message" else getattr(row, key)


@pytest.mark.parametrize("name", EFFECTS)
def test_honoured_inputs_arrive(model: ModuleType, table: Any, limits: Any, vocabulary: Any, name: str) -> None:
    value, where, key, expected = EFFECTS[name]
    assert value.dtype == TYPES[ROWS[name].data_type]
    tensors = request(**{name: value})
    table.check(tensors)
    assert effect(model, tensors, where, key, limits, vocabulary) == expected
    assert effect(model, request(), where, key, limits, vocabulary) != expected


def test_each_row_of_a_batch_gets_its_own_values(model: ModuleType, limits: Any, vocabulary: Any) -> None:
    tensors = {
        "input_ids": np.array([[0, 1, 2], [3, 4, 10]], np.int32),
        "input_lengths": np.array([3, 2], np.int32),
        "request_output_len": np.array([5, 6], np.int32),
        "runtime_top_k": np.array([2, 3], np.int32),
        "stop_words_list": np.array([[[1, 0], [1, -1]], [[2, 3], [2, -1]]], np.int32),
    }
    rows = model.read_rows(tensors, limits, vocabulary)
    assert [row.prompt for row in rows] == [[0, 1, 2], [3, 4]]
    assert [row.max_tokens for row in rows] == [5, 6]
    assert [row.message["top_k"] for row in rows] == [2, 3]
    assert [row.stop_words for row in rows] == [("b",), ("cd",)]


def test_the_request_of_nvidias_token_client(model: ModuleType, table: Any, limits: Any, vocabulary: Any) -> None:
    """Its defaults: top_k 1 with top_p 0.0, end_id -1, a pad_id beyond the vocabulary, extra ids all zero."""
    tensors = request(
        beam_width=np.array([1], np.int32),
        temperature=np.array([1.0], np.float32),
        streaming=np.array([False]),
        end_id=np.array([-1], np.int32),
        pad_id=np.array([50256], np.int32),
        runtime_top_k=np.array([1], np.int32),
        runtime_top_p=np.array([0.0], np.float32),
        prompt_table_extra_ids=np.zeros([1, 3], np.uint64),
    )
    table.check(tensors)
    (row,) = model.read_rows(tensors, limits, vocabulary)
    assert row.message["end_ids"] == []
    assert (row.prompt, row.max_tokens) == ([0, 1, 2], 5)


def test_table_file_and_ensemble_agree() -> None:
    """The column `ensemble` is the wiring, and `client` leads back to an input that the ensemble has."""
    first, second, _ = ensemble_steps("openvino")
    from_preprocessing = {made: name for name, made in first.outputs.items()}
    for row in ROWS.values():
        assert second.inputs.get(row.name) == row.ensemble
        if row.ensemble is None:
            assert row.client is None
        elif row.ensemble.startswith("_"):
            assert row.ensemble in from_preprocessing
            assert row.client in first.inputs.values()
        else:
            assert row.client == row.ensemble


def constants(path: str) -> dict[str, Any]:
    """Literal module constants of a model that can only be imported inside Triton."""
    found = {}
    for node in ast.parse((Path(shipped("model_repo")) / path).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def test_bls_does_something_with_each_of_its_inputs_and_wires_as_the_ensemble() -> None:
    bls = constants("tensorrt_llm_bls/model.py")
    prepared, passed, refused = bls["PREPROCESSING_INPUTS"], bls["PASSED"], set(bls["REFUSED"])
    assert {*prepared, *passed, *refused} == {
        tensor.name for tensor in interface("tensorrt_llm_bls", "openvino").inputs
    }
    first, second, _ = ensemble_steps("openvino")
    multimodal = {"image_bytes_input", "image_url_input", "video_bytes_input"}
    assert {name: target for name, target in prepared.items() if name not in multimodal} == {
        source: name for name, source in first.inputs.items()
    }
    through = {first.outputs[name]: target for name, target in bls["PREPARED"].items()}
    assert through | passed == {source: name for name, source in second.inputs.items()}


def test_preprocessing_refuses_or_maps_each_of_its_inputs() -> None:
    first, _, _ = ensemble_steps("openvino")
    known = {*first.inputs, *constants("preprocessing/model.py")["MULTIMODAL"]}
    assert known == {tensor.name for tensor in interface("preprocessing", "openvino").inputs}


def test_documentation_table_has_every_row_and_verdict() -> None:
    head, _, *lines = request_inputs_table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [cell.strip(" `") for cell in head.strip("|").split("|")][4:] == ["openvino", "tensorrt"]
    assert [row[0].split("`")[1] for row in cells] == list(ROWS)
    by_name = {row[0].split("`")[1]: row for row in cells}
    assert by_name["seed"] == ["`seed`", "`seed`", "UINT64", "[1]", "honoured", "honoured"]
    assert by_name["request_output_len"][:2] == ["`request_output_len` (required)", "`max_tokens`"]
    assert by_name["bad_words_list"][1:5] == ["`bad_words`", "INT32", "[2, -1]", "refused (neutral: 0, -1)"]
    assert by_name["lookahead_ngram_size"][4:] == ["refused", "honoured: decoding_mode lookahead"]


def test_file_is_strict_json_with_one_row_a_tensor() -> None:
    data = json.loads((Path(shipped("model_repo")) / "tensorrt_llm" / "tensors.json").read_text())
    names = [row["name"] for row in data["inputs"]]
    assert len(names) == len(set(names)) == 62
    for row in data["inputs"]:
        assert row["backends"].keys() == {"openvino", "tensorrt"}
        for verdict in row["backends"].values():
            assert verdict == "refused" or verdict == "honoured" or verdict.startswith("honoured: ")
        assert ("neutral" in row) == ("refused" in row["backends"].values())
