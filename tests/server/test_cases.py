"""Limits and wrong requests on the live server, one row each: what is answered, and that the server lives on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import numpy as np
import pytest
import tiny_model
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from lpxbuild.server.triton_http import TritonHttpError
from lpxbuild.smoke.client import ENSEMBLE, RequestFailed

# Of the served engine.
MAX_INPUT, MAX_SEQ, MAX_BATCH = 96, 320, 8
PROMPT = "The quick brown fox"


@pytest.fixture(autouse=True)
def alive(triton):
    """After each row the server answers as before, over both protocols."""
    yield
    assert triton.http.is_ready()
    fields = {"text_input": PROMPT, "max_tokens": 4, "exclude_input_in_output": True}
    assert triton.text(fields) == triton.text_over_http(fields) != ""


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_model.CASES / "baseline" / "tokenizer.json"))


def prompt_of(tokenizer, length: int) -> str:
    """A text that the tokenizer makes exactly so many ids of."""
    text = "".join("abcdefghijklmnopqrstuvwxyz"[number % 26] + " " for number in range(length)).rstrip()
    while len(tokenizer.encode(text).ids) > length:
        text = text[:-1]
    while len(tokenizer.encode(text).ids) < length:
        text += "!"
    assert len(tokenizer.encode(text).ids) == length
    return text


def ask(triton, text: str, **more):
    fields = {"text_input": text, "exclude_input_in_output": True, "return_num_output_tokens": True, **more}
    return triton.responses(ENSEMBLE, [fields])


def made(responses) -> int:
    return int(responses[-1].outputs["num_output_tokens"].reshape(-1)[0])


def post(server, body: dict, model: str = ENSEMBLE, verb: str = "generate"):
    """(status, document) of a plain HTTP request."""
    url = f"http://{server.http_url}/v2/models/{model}/{verb}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# Prompts and lengths.


def test_longest_prompt_is_answered(triton, tokenizer):
    assert made(ask(triton, prompt_of(tokenizer, MAX_INPUT), max_tokens=3, min_tokens=3)) == 3


@pytest.mark.parametrize("length", [MAX_INPUT + 1, MAX_INPUT + 40])
def test_longer_prompt_is_refused_with_both_numbers(triton, tokenizer, length):
    with pytest.raises(RequestFailed, match=str(MAX_INPUT)) as refusal:
        ask(triton, prompt_of(tokenizer, length), max_tokens=3)
    assert str(length) in str(refusal.value)


def test_prompt_and_answer_beyond_the_engines_length_are_cut_or_refused_but_always_the_same(triton, tokenizer):
    """90 and 300 tokens in 320: 230 are made."""
    text = prompt_of(tokenizer, 90)
    assert [made(ask(triton, text, max_tokens=300, min_tokens=230)) for _ in range(2)] == [MAX_SEQ - 90] * 2


def test_empty_prompt(tiny_server, triton, tokenizer):
    """The tokenizer makes a BOS id of it, or nothing at all; nothing is a wrong request."""
    if tokenizer.encode("").ids:
        assert made(ask(triton, "", max_tokens=3, min_tokens=3)) == 3
        return
    with pytest.raises(RequestFailed, match=r"empty|no token"):
        ask(triton, "", max_tokens=3)
    status, answer = post(tiny_server, {"text_input": "", "max_tokens": 3})
    assert (status, "error" in answer) == (400, True)


@pytest.mark.parametrize("number", [0, -1, -(2**31)])
def test_max_tokens_below_one_is_refused(tiny_server, triton, number):
    with pytest.raises(RequestFailed, match=f"max_tokens is {number}; it must be at least 1"):
        ask(triton, PROMPT, max_tokens=number)
    _, answer = post(tiny_server, {"text_input": PROMPT, "max_tokens": number})
    assert str(number) in answer["error"]


@pytest.mark.parametrize("number", [10**9, 2**31 - 1])
def test_huge_max_tokens_means_the_room_that_is_left(triton, tokenizer, number):
    length = len(tokenizer.encode(PROMPT).ids)
    room = MAX_SEQ - length
    assert made(ask(triton, PROMPT, max_tokens=number, min_tokens=room)) == room


def test_end_id_minus_one_means_that_nothing_ends_the_text(triton):
    """This prompt's answer meets the end id before the room is used up."""
    ended = made(ask(triton, PROMPT, max_tokens=MAX_SEQ))
    unended = made(ask(triton, PROMPT, max_tokens=MAX_SEQ, min_tokens=MAX_SEQ))
    assert ended < unended
    assert made(ask(triton, PROMPT, max_tokens=MAX_SEQ, end_id=-1)) == unended


@pytest.mark.parametrize("value", ["5", 1.5, None, [1, 2], {"a": 1}, True])
def test_max_tokens_of_another_kind_is_refused(tiny_server, value):
    """By Triton's own JSON reader, before any model sees it: 500 and no name of the tensor for all but a list."""
    status, answer = post(tiny_server, {"text_input": PROMPT, "max_tokens": value})
    assert status in (400, 500)
    assert answer["error"]


def test_max_tokens_beyond_32_bits_is_refused(tiny_server):
    """Triton cuts the number to INT32: 2**40 arrives as 0."""
    status, answer = post(tiny_server, {"text_input": PROMPT, "max_tokens": 2**40})
    assert (status, "max_tokens is 0" in answer["error"]) == (400, True)


def test_max_tokens_absent_makes_no_answer(tiny_server, triton):
    """Refused by name where nothing else is sent, and by BLS always.

    Triton only counts the inputs of an ensemble: with an optional one in its place the request ends empty.
    """
    status, answer = post(tiny_server, {"text_input": PROMPT})
    assert (status, "missing required input(s) ['max_tokens']" in answer["error"]) == (400, True)
    fields = {"text_input": PROMPT, "exclude_input_in_output": True}
    with pytest.raises(RequestFailed, match="REQUEST_OUTPUT_LEN"):
        triton.responses("tensorrt_llm_bls", [fields])
    assert triton.responses(ENSEMBLE, [fields]) == []
    assert "error" in post(tiny_server, fields)[1]


# Batches and beams.


def test_widest_batch_is_answered_and_a_wider_one_refused(triton):
    fields = {"text_input": PROMPT, "max_tokens": 2}
    rows = triton.responses(ENSEMBLE, [fields] * MAX_BATCH)
    assert sorted(int(row.outputs["batch_index"].reshape(-1)[0]) for row in rows) == list(range(MAX_BATCH))
    with pytest.raises(RequestFailed, match=rf"batch.size must be <= {MAX_BATCH}"):
        triton.responses(ENSEMBLE, [fields] * (MAX_BATCH + 1))


def test_beam_width_beyond_the_engines_is_refused_with_both_numbers(tiny_server, triton):
    with pytest.raises(RequestFailed, match="beam_width is 2, max_beam_width is 1"):
        ask(triton, PROMPT, max_tokens=3, beam_width=2)
    _, answer = post(tiny_server, {"text_input": PROMPT, "max_tokens": 3, "beam_width": 2})
    assert "beam_width is 2, max_beam_width is 1" in answer["error"]


# Decoupled models and plain requests.


@pytest.mark.parametrize("model", [ENSEMBLE, "tensorrt_llm", "tensorrt_llm_bls"])
def test_plain_infer_on_a_streaming_repository_says_what_is_wrong(tiny_server, triton, model):
    fields = (
        {"input_ids": [5], "input_lengths": 1, "request_output_len": 2}
        if model == "tensorrt_llm"
        else {"text_input": PROMPT, "max_tokens": 2}
    )
    with pytest.raises(RequestFailed, match="decoupled") as refusal:
        triton.infer(model, [fields])
    assert refusal.value.status == "UNIMPLEMENTED"
    inputs = [
        {
            "name": entry.name(),
            "shape": list(entry.shape()),
            "datatype": entry.datatype(),
            "data": [PROMPT] if entry.datatype() == "BYTES" else [1] * int(np.prod(entry.shape())),
        }
        for entry in triton.inputs(model, [fields])
    ]
    with pytest.raises(TritonHttpError, match="decoupled"):
        triton.http.infer(model, inputs, 10)
    status, answer = post(tiny_server, fields, model)
    assert status == 200, answer


# Types and shapes.


@pytest.mark.parametrize("kind", [np.uint32, np.int64, np.float32, object])
def test_wrong_type_is_refused_naming_tensor_and_types(tiny_server, kind):
    value = np.array([[b"4"]], object) if kind is object else np.array([[4]], kind)
    error = send(tiny_server, {"text_input": np.array([[PROMPT]], object), "max_tokens": value})
    assert "max_tokens" in error
    assert "INT32" in error


@pytest.mark.parametrize("shape", [(1,), (1, 1, 1), (1, 2), (2, 1)])
def test_wrong_shape_is_refused(tiny_server, shape):
    error = send(tiny_server, {"text_input": np.array([[PROMPT]], object), "max_tokens": np.full(shape, 4, np.int32)})
    assert error


def test_unknown_tensor_is_refused_by_name(tiny_server):
    request = {"text_input": np.array([[PROMPT]], object), "max_tokens": np.array([[4]], np.int32)}
    assert "max_new_tokens" in send(tiny_server, request | {"max_new_tokens": np.array([[4]], np.int32)})


def send(server, arrays: dict[str, np.ndarray]) -> str:
    """The error text of a request that must be refused."""
    answers: list = []
    inputs = []
    for name, array in arrays.items():
        inputs.append(grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    with grpc.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(callback=lambda result, error: answers.append(error or result))
        client.async_stream_infer(ENSEMBLE, inputs)
        client.stop_stream()
    (refusal,) = answers
    assert isinstance(refusal, InferenceServerException), refusal
    return refusal.message()


def test_unequal_rows_are_answered_as_alone_without_padding(triton):
    prompts = ["a", "the quick brown fox", "of the people, by the people"]
    fields = {"max_tokens": 12, "exclude_input_in_output": True, "end_id": -1}
    alone = [triton.text({"text_input": prompt, **fields}) for prompt in prompts]
    found = ["", "", ""]
    for response in triton.responses(ENSEMBLE, [{"text_input": prompt, **fields} for prompt in prompts]):
        found[int(response.outputs["batch_index"].reshape(-1)[0])] += "".join(response.texts())
    assert found == alone
