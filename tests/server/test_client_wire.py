"""What NVIDIA's two public clients put on the wire for the inflight_batcher_llm layout, and how they read the answers.

The tensors, their types, shapes and default values are those of `end_to_end_grpc_client.py` (text, to the ensemble or
tensorrt_llm_bls) and `inflight_batcher_llm_client.py` (token ids, to tensorrt_llm). Only tritonclient is used here:
what lpx's own client smooths over would not be seen.
"""

from __future__ import annotations

import queue
import time

import numpy as np
import pytest
import tiny_model
from tritonclient import grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PROMPT = "The quick brown fox"
TEXT_MODELS = ("ensemble", "tensorrt_llm_bls")
PERF_METRICS = (
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "kv_cache_alloc_total_blocks",
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_model.CASES / "baseline" / "tokenizer.json"))


def prepared(arrays: dict[str, np.ndarray]) -> list[grpc.InferInput]:
    made = []
    for name, array in arrays.items():
        entry = grpc.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        entry.set_data_from_numpy(array)
        made.append(entry)
    return made


def over_stream(url: str, model: str, requests: list[dict[str, np.ndarray]], outputs=None, request_id: str = ""):
    """start_stream, async_stream_infer of each request, stop_stream: results until the stream is over."""
    answers: queue.Queue = queue.Queue()
    asked = None if outputs is None else [grpc.InferRequestedOutput(name) for name in outputs]
    with grpc.InferenceServerClient(url) as client:
        client.start_stream(callback=lambda result, error: answers.put(error or result))
        for arrays in requests:
            client.async_stream_infer(model, prepared(arrays), outputs=asked, request_id=request_id)
        client.stop_stream()
    return list(answers.queue)


def text_request(*prompts: str, tokens: int = 16, stream: bool = False, **more: np.ndarray) -> dict[str, np.ndarray]:
    """`end_to_end_grpc_client.py`: always these six."""
    rows = len(prompts)
    return {
        "text_input": np.array([[prompt] for prompt in prompts], dtype=object),
        "max_tokens": np.full((rows, 1), tokens, np.int32),
        "stream": np.full((rows, 1), stream),
        "beam_width": np.full((rows, 1), 1, np.int32),
        "temperature": np.full((rows, 1), 1.0, np.float32),
        "exclude_input_in_output": np.full((rows, 1), False),
    } | more


def read_text(result) -> str:
    """`output[0].decode()`: text_output must have one dimension."""
    assert not isinstance(result, InferenceServerException), result
    return result.as_numpy("text_output")[0].decode("utf-8")


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client(tiny_server, triton, model):
    answer = triton.text({"text_input": PROMPT, "max_tokens": 16, "exclude_input_in_output": True})
    (whole,) = over_stream(tiny_server.grpc_url, model, [text_request(PROMPT)], ["text_output"])
    # Neither top_k nor top_p is sent: greedy. The prompt is part of a whole text and never of a stream.
    assert read_text(whole) == PROMPT + answer
    pieces = over_stream(tiny_server.grpc_url, model, [text_request(PROMPT, stream=True)], ["text_output"])
    assert len(pieces) > 3
    assert "".join(map(read_text, pieces)) == answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client_with_all_that_it_can_ask_back(tiny_server, model, stream):
    """Every response must have every output asked for, [1, 1] each: the client reads `[0][0]` without looking."""
    yes = np.array([[True]])
    request = text_request(PROMPT, stream=stream, return_log_probs=yes, return_perf_metrics=yes)
    outputs = ["text_output", "cum_log_probs", "output_log_probs", *PERF_METRICS]
    results = over_stream(tiny_server.grpc_url, model, [request], outputs)
    assert results
    for result in results:
        read_text(result)
        assert result.as_numpy("cum_log_probs").shape == (1, 1)
        assert result.as_numpy("output_log_probs").shape[:2] == (1, 1)
        for name in PERF_METRICS:
            assert result.as_numpy(name).shape == (1, 1)
    times = [int(results[-1].as_numpy(name)[0][0]) for name in PERF_METRICS[3:7]]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client_with_batched_inputs(tiny_server, triton, model):
    prompts = ["a", PROMPT]
    results = over_stream(
        tiny_server.grpc_url, model, [text_request(*prompts, stream=True)], ["text_output", "batch_index"]
    )
    texts = ["", ""]
    for result in results:
        texts[result.as_numpy("batch_index")[0][0]] += read_text(result)
    assert texts == [
        triton.text({"text_input": prompt, "max_tokens": 16, "exclude_input_in_output": True}) for prompt in prompts
    ]


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client_with_several_sequences(tiny_server, model):
    more = {"num_return_sequences": np.array([[2]], np.int32)}
    results = over_stream(
        tiny_server.grpc_url, model, [text_request(PROMPT, **more)], ["text_output", "sequence_index"]
    )
    assert sorted(result.as_numpy("sequence_index")[0][0] for result in results) == [0, 1]
    assert all(read_text(result).startswith(PROMPT) for result in results)


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client_with_stop_and_bad_words(tiny_server, model):
    (whole,) = over_stream(tiny_server.grpc_url, model, [text_request(PROMPT)], ["text_output"])
    answer = read_text(whole).removeprefix(PROMPT)
    word = answer[4:6]
    words = {"stop_words": np.array([["zzzz", word]], dtype=object)}
    (stopped,) = over_stream(tiny_server.grpc_url, model, [text_request(PROMPT, **words)], ["text_output"])
    assert read_text(stopped) == PROMPT + answer[: answer.index(word)]
    words = {"bad_words": np.array([["no"]], dtype=object)}
    (refused,) = over_stream(tiny_server.grpc_url, model, [text_request(PROMPT, **words)], ["text_output"])
    assert "bad_words" in refused.message()


def token_request(ids: list[int], tokens: int = 16, stream: bool = False, **more) -> dict[str, np.ndarray]:
    """`inflight_batcher_llm_client.py` with its defaults for token files: end_id -1, pad_id beyond the vocabulary."""
    return {
        "input_ids": np.array([ids], np.int32),
        "input_lengths": np.array([[len(ids)]], np.int32),
        "request_output_len": np.array([[tokens]], np.int32),
        "beam_width": np.array([[more.pop("beam_width", 1)]], np.int32),
        "temperature": np.array([[1.0]], np.float32),
        "streaming": np.array([[stream]]),
        "end_id": np.array([[-1]], np.int32),
        "pad_id": np.array([[50256]], np.int32),
        "runtime_top_k": np.array([[1]], np.int32),
        "runtime_top_p": np.array([[0.0]], np.float32),
    } | more


def read_ids(result, beam: int = 0) -> list[int]:
    assert not isinstance(result, InferenceServerException), result
    length = result.as_numpy("sequence_length")[0][beam]
    return result.as_numpy("output_ids")[0][beam][:length].tolist()


def test_token_client(tiny_server, tokenizer):
    ids = tokenizer.encode(PROMPT).ids
    (whole,) = over_stream(tiny_server.grpc_url, "tensorrt_llm", [token_request(ids)])
    made = read_ids(whole)
    assert made[: len(ids)] == ids
    assert len(made) == len(ids) + 16
    pieces = over_stream(tiny_server.grpc_url, "tensorrt_llm", [token_request(ids, stream=True)])
    assert len(pieces) > 3
    assert [token for piece in pieces for token in read_ids(piece)] == made[len(ids) :]
    more = {"exclude_input_in_output": np.array([[True]]), "prompt_table_extra_ids": np.zeros((1, len(ids)), np.uint64)}
    (answer,) = over_stream(tiny_server.grpc_url, "tensorrt_llm", [token_request(ids, **more)])
    assert read_ids(answer) == made[len(ids) :]


def test_token_client_gets_the_outputs_that_it_asks_for_and_no_others(tiny_server, tokenizer):
    names = {"output_ids", "sequence_length"}
    (result,) = over_stream(
        tiny_server.grpc_url, "tensorrt_llm", [token_request(tokenizer.encode(PROMPT).ids)], sorted(names)
    )
    assert {output.name for output in result.get_response().outputs} == names


def stop_request() -> dict[str, np.ndarray]:
    """The content of input_ids is whatever lay in memory."""
    return {
        "input_ids": np.array([[-(2**31)]], np.int32),
        "input_lengths": np.zeros((1, 1), np.int32),
        "request_output_len": np.array([[0]], np.int32),
        "stop": np.array([[True]]),
    }


def test_token_client_stops_its_request_by_a_second_one(slow_repository, tokenizer, tmp_path, traces):
    from lpxbuild.server import ServerSettings, start

    ids = tokenizer.encode(PROMPT).ids
    answers: queue.Queue = queue.Queue()
    with start(slow_repository, log_path=tmp_path / "triton.log", settings=ServerSettings(drain_seconds=2)) as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        with grpc.InferenceServerClient(server.grpc_url) as client:
            client.start_stream(callback=lambda result, error: answers.put(error or result))
            request = prepared(token_request(ids, tokens=200, stream=True))
            client.async_stream_infer("tensorrt_llm", request, request_id="7")
            first = answers.get(timeout=20)
            started = time.monotonic()
            client.async_stream_infer("tensorrt_llm", prepared(stop_request()), request_id="7")
            client.stop_stream()
            assert time.monotonic() - started < 4
    made = read_ids(first)
    for result in list(answers.queue):
        assert not isinstance(result, InferenceServerException), result
        if result.as_numpy("output_ids") is not None:
            made += read_ids(result)
    assert 0 < len(made) < 200


def test_stop_of_nothing(tiny_server):
    """An unknown id is answered with an empty response, a missing one is an error."""
    for answer in over_stream(tiny_server.grpc_url, "tensorrt_llm", [stop_request()], request_id="nobody"):
        assert not isinstance(answer, InferenceServerException), answer
        assert answer.as_numpy("output_ids") is None
    (refused,) = over_stream(tiny_server.grpc_url, "tensorrt_llm", [stop_request()])
    assert "request id" in refused.message()


def test_unary_token_client_needs_a_repository_without_streaming(tiny_server, beam_server, tokenizer):
    ids = tokenizer.encode(PROMPT).ids
    with grpc.InferenceServerClient(tiny_server.grpc_url) as client:
        with pytest.raises(InferenceServerException, match="decoupled") as refusal:
            client.infer("tensorrt_llm", prepared(token_request(ids)))
        assert "UNIMPLEMENTED" in refusal.value.status()
    (streamed,) = over_stream(tiny_server.grpc_url, "tensorrt_llm", [token_request(ids)])
    with grpc.InferenceServerClient(beam_server.grpc_url) as client:
        result = client.infer("tensorrt_llm", prepared(token_request(ids)))
        assert read_ids(result) == read_ids(streamed)
        # Two beams, in one response.
        result = client.infer("tensorrt_llm", prepared(token_request(ids, beam_width=2)))
        assert result.as_numpy("output_ids").shape[:2] == (1, 2)
        assert read_ids(result, 0) != read_ids(result, 1)
        for beam in (0, 1):
            assert read_ids(result, beam)[: len(ids)] == ids
            assert len(read_ids(result, beam)) == len(ids) + 16


@pytest.mark.parametrize("model", TEXT_MODELS)
def test_text_client_on_a_repository_without_streaming(beam_server, triton, model):
    (whole,) = over_stream(beam_server.grpc_url, model, [text_request(PROMPT)], ["text_output"])
    answer = triton.text({"text_input": PROMPT, "max_tokens": 16, "exclude_input_in_output": True})
    assert read_text(whole) == PROMPT + answer
    request = text_request(PROMPT) | {"beam_width": np.array([[2]], np.int32)}
    (beams,) = over_stream(beam_server.grpc_url, model, [request], ["text_output"])
    assert beams.as_numpy("text_output").shape == (2,)
    assert read_text(beams).startswith(PROMPT)
