"""NVIDIA's two public clients, unchanged, against the live server.

LPX_NVIDIA_CLIENTS is a folder with `end_to_end_grpc_client.py` and `inflight_batcher_llm_client.py` of
tensorrtllm_backend (v0.19.0 was tried); they are not part of lpx. `test_client_wire.py` holds their requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_model

# In test-all only: the files have to be fetched by hand, and the second one imports transformers each time.
pytestmark = pytest.mark.full

FOLDER = os.environ.get("LPX_NVIDIA_CLIENTS", "")
PROMPT = "The quick brown fox"
TOKENS = 12


def client_file(name: str) -> Path:
    path = Path(FOLDER) / name
    if not FOLDER or not path.is_file():
        pytest.skip(f"LPX_NVIDIA_CLIENTS={FOLDER!r} is no folder with {name} of github.com/triton-inference-server")
    return path


def run_client(command: list, extra_path: Path | None = None) -> str:
    environment = dict(os.environ, HF_HUB_OFFLINE="1", **({"PYTHONPATH": str(extra_path)} if extra_path else {}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout.lower(), done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def answer(triton) -> str:
    return triton.text({"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True})


def end_to_end(server, *more: str, expected: str | None, model: str = "ensemble") -> str:
    file = client_file("end_to_end_grpc_client.py")
    command = [sys.executable, file, "-u", server.grpc_url, "-p", PROMPT, "-o", str(TOKENS), "--model-name", model]
    check = [] if expected is None else ["--check-outputs", "--expected-outputs", json.dumps([expected])]
    return run_client([*command, *more, *check])


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("-S",),
        ("--exclude-input-in-output",),
        ("--return-log-probs", "--return-perf-metrics"),
        ("-S", "--return-log-probs", "--return-perf-metrics"),
        ("--batch-inputs",),
        ("-S", "--batch-inputs"),
    ],
    ids=" ".join,
)
def test_end_to_end_client(tiny_server, answer, model, options):
    """The client itself compares: with the prompt before the answer unless it streams or leaves the prompt out."""
    end_to_end(tiny_server, *options, expected=answer, model=model)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_end_to_end_client_with_stop_words(tiny_server, answer, model):
    word = answer[3:5]
    end_to_end(tiny_server, "--stop-words", word, expected=answer[: answer.index(word)], model=model)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_end_to_end_client_with_beams(beam_server, answer, model):
    from lpxbuild.smoke.client import TritonClient

    client = TritonClient(beam_server.http_url, beam_server.grpc_url, idle=30)
    fields = {"text_input": PROMPT, "max_tokens": TOKENS, "exclude_input_in_output": True, "beam_width": 2}
    best = client.infer("ensemble", [fields]).texts()[0]
    # It shows the best beam, and cannot compare more than one.
    assert PROMPT + best in end_to_end(beam_server, "-b", "2", expected=None, model=model)
    end_to_end(beam_server, expected=answer, model=model)


@pytest.fixture(scope="module")
def token_files(triton, tmp_path_factory) -> list[str]:
    """Options with the prompt's ids and the ids that must come back, as the client wants them."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(tiny_model.CASES / "baseline" / "tokenizer.json")).encode(PROMPT).ids
    fields = {"input_ids": ids, "input_lengths": len(ids), "request_output_len": TOKENS, "end_id": -1}
    made = triton.responses("tensorrt_llm", [fields])[-1].outputs["output_ids"].reshape(-1).tolist()
    folder = tmp_path_factory.mktemp("tokens")
    for name, row in (("in.csv", ids), ("out.csv", made)):
        (folder / name).write_text(",".join(map(str, row)) + "\n")
    files = ["--input-tokens-csv", str(folder / "in.csv"), "--output-tokens-csv", str(folder / "out.csv"), "-c"]
    return [*files, "--request-output-len", str(TOKENS)]


@pytest.fixture(scope="module")
def token_client(reference_python, tmp_path_factory):
    """Run the token client with the interpreter that has transformers, with tritonclient and what it needs added."""
    import importlib.util

    file = client_file("inflight_batcher_llm_client.py")
    packages = tmp_path_factory.mktemp("packages")
    site = Path(importlib.util.find_spec("tritonclient").origin or "").parents[1]
    for name in ("tritonclient", "grpc", "google", "ml_dtypes", "rapidjson"):
        for found in site.glob(f"{name}*"):
            if not found.name.endswith("-info"):
                (packages / found.name).symlink_to(found)
    return lambda server, *options: run_client([reference_python, file, "-u", server.grpc_url, *options], packages)


@pytest.mark.parametrize(
    "options", [("-S",), ("-S", "--return-log-probs"), ("-S", "--return-perf-metrics")], ids=" ".join
)
def test_token_client_streams(tiny_server, token_client, token_files, options):
    token_client(tiny_server, *token_files, *options)


@pytest.mark.parametrize("options", [(), ("--return-log-probs", "--return-perf-metrics")], ids=" ".join)
def test_token_client_without_streaming(beam_server, token_client, token_files, options):
    token_client(beam_server, *token_files, *options)


def test_token_client_stops_its_request(tiny_server, token_client, token_files):
    token_client(
        tiny_server, *token_files[:2], "-S", "--request-output-len", "300", "--stop-after-ms", "20", "--request-id", "9"
    )
