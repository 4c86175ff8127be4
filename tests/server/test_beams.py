"""Beam search through Triton, where a repository was built for it: without streaming, two beams at most."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import tiny_model

from lpxbuild.errors import UsageError
from lpxbuild.repository import RepositorySettings
from lpxbuild.smoke import Endpoints, run
from lpxbuild.smoke.client import BLS, ENSEMBLE, RequestFailed, TritonClient

# Over 20 s on a busy machine: the reference environment imports torch.
pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "reference" / "beam_search.py"
PROMPT = "The quick brown fox"
TOKENS = 16


@pytest.fixture(scope="module")
def client(beam_server) -> TritonClient:
    return TritonClient(beam_server.http_url, beam_server.grpc_url, idle=30)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_model.CASES / "baseline" / "tokenizer.json")).encode(PROMPT).ids


@pytest.fixture(scope="module")
def reference(ids, reference_python, tmp_path_factory) -> dict:
    place = tmp_path_factory.mktemp("beam_reference")
    source = tiny_model.make_source(place / "source")
    (place / "prompt.json").write_text(json.dumps(ids))
    command = [reference_python, SCRIPT, source, place / "prompt.json", place / "out.json", "2", str(TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads((place / "out.json").read_text())


def fields(**more):
    return {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True, "end_id": -1, **more}


def test_beams_are_those_of_transformers(client, reference, ids):
    tokens = {
        "input_ids": ids,
        "input_lengths": len(ids),
        "request_output_len": TOKENS,
        "beam_width": 2,
        "end_id": -1,
        "exclude_input_in_output": True,
        "return_log_probs": True,
    }
    outputs = client.infer("tensorrt_llm", [tokens]).outputs
    assert outputs["sequence_length"].tolist() == [[TOKENS, TOKENS]]
    assert outputs["output_ids"][0].tolist() == reference["beams"]
    assert outputs["cum_log_probs"][0].tolist() == pytest.approx(reference["log_probs"], abs=1e-3)
    # The search is one: its best beam is better than what the greedy walk finds, or at least another.
    greedy = client.infer("tensorrt_llm", [tokens | {"beam_width": 1}]).outputs
    assert greedy["output_ids"][0, 0].tolist() != reference["beams"][0]
    assert float(greedy["cum_log_probs"].reshape(-1)[0]) < reference["log_probs"][0]


@pytest.mark.parametrize("model", [ENSEMBLE, BLS])
def test_text_has_one_row_per_beam_in_one_dimension(client, reference, model):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model.CASES / "baseline" / "tokenizer.json"))
    response = client.infer(model, [fields(beam_width=2)])
    assert response.outputs["text_output"].shape == (2,)
    assert response.texts() == [tokenizer.decode(beam) for beam in reference["beams"]]


@pytest.mark.parametrize("model", [ENSEMBLE, BLS])
def test_more_beams_than_built_for_are_refused_with_both_numbers(client, model):
    with pytest.raises(RequestFailed, match=r"beam_width is 3, max_beam_width is 2"):
        client.infer(model, [fields(beam_width=3)])
    assert client.text(fields(beam_width=1))


def test_beams_and_streaming_exclude_each_other(client, triton):
    with pytest.raises(UsageError, match=r"beam search .* and streaming"):
        RepositorySettings(max_beam_width=2, decoupled=True)
    with pytest.raises(RequestFailed, match=r"serve\.streaming"):
        client.infer(ENSEMBLE, [fields(beam_width=2, stream=True)])
    with pytest.raises(RequestFailed, match=r"streaming with beam_width 2"):
        triton.responses(ENSEMBLE, [fields(beam_width=2, stream=True)])


def test_smoke_passes_on_it(beam_server):
    report = run(Endpoints(beam_server.http_url, beam_server.grpc_url), idle=20)
    assert report.failed == ()
    assert {check.name for check in report.checks if check.status == "pass"} > {"unary", "bls equals ensemble"}
