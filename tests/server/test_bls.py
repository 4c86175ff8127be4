"""`tensorrt_llm_bls` on the live server: the ensemble's answers, and the one thing that the ensemble cannot do."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from traces import wait_until

from lpxbuild.server import ServerSettings, start
from lpxbuild.server.engine_host import EngineLink
from lpxbuild.smoke.client import BLS, ENSEMBLE, RequestFailed, TritonClient

PROMPT = "The quick brown fox"


def fields(text: str = PROMPT, max_tokens: int = 24, **more):
    return {"text_input": text, "max_tokens": max_tokens, "exclude_input_in_output": True, **more}


def pieces(triton, model: str = BLS, **more) -> list[str]:
    with triton.stream(model, [fields(stream=True, **more)]) as stream:
        return [text for response in stream for text in response.texts()]


def test_unary_and_streams_equal_the_ensemble(triton):
    whole = triton.text(fields())
    assert whole
    assert triton.text(fields(), model=BLS) == whole
    assert "".join(pieces(triton)) == whole
    assert len(pieces(triton)) > 3
    assert triton.http.generate(BLS, fields(), 20)["text_output"] == whole
    events = list(triton.http.generate_stream(BLS, {**fields(), "stream": True}, 20))
    assert "".join(event["text_output"] for event in events if "text_output" in event) == whole


def test_prompt_comes_back_unless_excluded(triton):
    with_prompt = {key: value for key, value in fields().items() if key != "exclude_input_in_output"}
    assert triton.text(with_prompt, model=BLS) == PROMPT + triton.text(fields(), model=BLS)


def test_stop_words_end_the_text(triton):
    whole = triton.text(fields())
    middle = len(whole) // 2
    word = whole[middle : middle + 2]
    wanted = whole[: whole.index(word)]
    assert triton.text(fields(stop_words=["zzzz", word]), model=BLS) == wanted
    assert "".join(pieces(triton, stop_words=["zzzz", word])) == wanted
    assert triton.text(fields(stop_words=[""]), model=BLS) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_rows_of_a_batch_are_answered_as_alone(triton, stream):
    prompts = ["a", "the quick brown fox", "x y z"]
    alone = [triton.text(fields(prompt)) for prompt in prompts]
    found = ["", "", ""]
    for response in triton.responses(BLS, [fields(prompt, stream=stream) for prompt in prompts]):
        found[int(response.outputs["batch_index"].reshape(-1)[0])] += "".join(response.texts())
    assert found == alone


def test_sampling_and_counts_pass_through(triton):
    sampled = {"top_k": 50, "temperature": 1.0, "seed": 11}
    assert triton.text(fields(**sampled), model=BLS) == triton.text(fields(**sampled))
    assert triton.text(fields(**sampled), model=BLS) != triton.text(fields())
    ours, theirs = (
        triton.responses(name, [fields(max_tokens=5, return_log_probs=True, return_num_output_tokens=True)])[-1].outputs
        for name in (BLS, ENSEMBLE)
    )
    assert int(ours["num_output_tokens"].reshape(-1)[0]) == 5
    assert ours["output_log_probs"].tolist() == theirs["output_log_probs"].tolist()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"text_input": " x7" * 97}, "96"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"beam_width": 2}, "beam"),
        ({"num_draft_tokens": 2}, "num_draft_tokens"),
    ],
)
def test_refusals_are_the_engines_own_words(triton, wrong, words):
    for stream in (False, True):
        with pytest.raises(RequestFailed, match=words) as refusal:
            triton.responses(BLS, [fields(stream=stream) | wrong])
        assert "Traceback" not in str(refusal.value)
    assert triton.text(fields(max_tokens=2), model=BLS)


def engine_link(tiny_server) -> EngineLink:
    return EngineLink(tiny_server.runtime.folder, timeout=10)


@pytest.fixture
def slow_bls(slow_repository, tmp_path, traces):
    with start(slow_repository, log_path=tmp_path / "triton.log", settings=ServerSettings(drain_seconds=2)) as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        yield TritonClient(server.http_url, server.grpc_url, idle=20), server


def test_cancelled_stream_ends_in_the_engine(slow_bls):
    """Triton cancels no child requests: BLS turns the client's cancel into a stop of the engine's request."""
    client, server = slow_bls
    with engine_link(server) as link:
        with client.stream(BLS, [fields("x y", 200, stream=True, min_tokens=200)]) as stream:
            next(stream)
            assert link.stats()["active"] == 1
        wait_until(lambda: link.stats()["active"] == 0, 2, "the engine's request has ended")
        # 200 tokens need 20 s.
        assert link.stats()["tokens_total"] < 60
    assert client.text(fields("x y", 2), model=BLS)


def test_accumulated_text(triton):
    """accumulate_tokens: each response has the whole text so far. Set by hand in config.pbtxt; here over the API."""
    config = json.loads(triton.http._call("GET", f"/v2/models/{BLS}/config", timeout=10))

    def load(value: str) -> None:
        config["parameters"]["accumulate_tokens"]["string_value"] = value
        body = {"parameters": {"config": json.dumps(config)}}
        triton.http._call("POST", f"/v2/repository/models/{BLS}/load", body, timeout=30)

    whole = triton.text(fields())
    load("true")
    try:
        found = pieces(triton)
        assert triton.text(fields(), model=BLS) == whole
    finally:
        load("false")
    assert found[-1] == whole
    assert len(found) > 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(found))
    assert "".join(pieces(triton)) == whole
