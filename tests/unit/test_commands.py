"""`serve`, `smoke`, `inspect` and `init` at the command, with a real tiny build; servers are the real tritonserver."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from lpxbuild.pipeline.inspection import KINDS

pytest.importorskip("pytriton")
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "parity"), str(TESTS / "unit")]
import test_gguf_small  # noqa: E402  a sibling folder, not a package
from test_source_hub import MODEL, Handler, Hub  # noqa: E402

BASELINE = TESTS / "cases" / "data" / "baseline"
SECRET = "hf_secret_of_the_commands"

ANY_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


@pytest.fixture
def place(tiny_place, tmp_path: Path):
    """A copy of the tiny build, to write into."""
    shutil.copytree(tiny_place.folder / "build", tmp_path / "build")
    (tmp_path / "model").symlink_to(tiny_place.folder / "model")
    shutil.copy(tiny_place.folder / "r.yaml", tmp_path)
    return type(tiny_place)(tmp_path, {"LPX_CACHE": str(tiny_place.folder / "cache"), "HF_TOKEN": SECRET})


# serve ------------------------------------------------------------------------------------------------------------


def test_a_build_without_proof_is_said_and_refused_where_proof_is_required(tiny_place):
    refused = tiny_place.lpx("serve", "build/tiny", "--require-proven", "--dry-run", *ANY_PORTS)
    assert refused.returncode == 1
    assert "build/tiny is not proven" in refused.stderr
    assert "built to repository" in refused.stderr
    assert refused.stdout == ""


def test_an_edited_repository_is_said(place):
    model = place.repository / "postprocessing" / "1" / "model.py"
    model.write_text(model.read_text() + "\n# mine\n")
    refused = place.lpx("serve", "build/tiny", "--dry-run", "--require-proven", "--json", *ANY_PORTS)
    assert refused.returncode == 1
    assert "was changed after the build" in json.loads(refused.stdout)["why"]


def test_the_printed_command_is_one_that_the_server_takes(tiny_place):
    done = tiny_place.lpx("serve", "build/tiny", "--dry-run", "--json", *ANY_PORTS)
    assert "notice: build/tiny is not proven: its state is: built to repository" in done.stderr
    shown = json.loads(done.stdout)
    assert Path(shown["command"][0]).name == "tritonserver"
    assert str(tiny_place.repository) in " ".join(shown["command"])
    checked = subprocess.run(
        [shown["command"][0], "--help"],
        env={**os.environ, **shown["environment"]},
        capture_output=True,
        text=True,
        check=False,
    )
    options = {part.partition("=")[0] for part in shown["command"][1:] if part.startswith("--")}
    assert options
    assert [option for option in sorted(options) if option not in checked.stdout + checked.stderr] == []


@pytest.fixture
def detached(place) -> Iterator[tuple]:
    log = place.folder / "mine.log"
    done = place.lpx("serve", "build/tiny", "--detach", "--json", "--log", log, *ANY_PORTS)
    try:
        assert done.returncode == 0, done.stderr
        yield place, json.loads(done.stdout), log
    finally:
        place.lpx("serve", "build/tiny", "--stop")


def told_to_others(folder: Path) -> Iterator[tuple[str, str]]:
    """What a server makes others see: files of its build, logs, command lines of all processes."""
    for path in (*folder.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline")):
        with contextlib.suppress(OSError):  # ended meanwhile, or a socket
            if path.is_file():
                yield str(path), path.read_bytes().decode(errors="replace")


def test_detach_log_smoke_by_address_and_stop(detached):
    place, status, log = detached
    url = f"http://{status['http_url'].removeprefix('http://')}/v2/models/ensemble/generate"
    body = json.dumps({"text_input": "abc", "max_tokens": 4}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        assert json.load(answer)["text_output"]
    assert "ensemble" in log.read_text(errors="replace")
    assert [name for name in told_to_others(place.folder) if SECRET in name[1]] == []
    address = status["http_url"].removeprefix("http://")
    grpc = status["grpc_url"].removeprefix("http://")
    smoke = place.lpx("smoke", address, "--grpc", grpc, "--build", "build/tiny", "--json")
    assert smoke.returncode == 0, smoke.stderr
    names = {check["name"]: check["status"] for check in json.loads(smoke.stdout)["checks"]}
    assert names["prompt 1"] == "pass"
    stopped = place.lpx("serve", "build/tiny", "--stop", "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"stopped": "build/tiny"})
    again = place.lpx("serve", "build/tiny", "--stop")
    assert again.returncode == 2
    assert "no server of build/tiny is running" in again.stderr


# smoke ------------------------------------------------------------------------------------------------------------


def test_smoke_of_a_build_passes_without_faking_the_state(place):
    done = place.lpx("smoke", "build/tiny", "--junit", "out/smoke.xml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ET.parse(place.folder / "out" / "smoke.xml").getroot().findall(".//testcase")
    assert "prompt 1" in done.stdout
    assert json.loads(place.lpx("inspect", "build/tiny", "--json").stdout)["state"] == "built to repository"


def test_smoke_of_a_build_that_answers_otherwise_fails_and_lowers_its_state(place):
    recipe = (place.folder / "r.yaml").read_text().replace("max_tokens: 8", "max_tokens: 8, expect: no such text")
    (place.folder / "r.yaml").write_text(recipe)
    assert place.lpx("build", "r.yaml", "--to", "repository").returncode == 0
    done = place.lpx("smoke", "build/tiny", "--junit", "smoke.xml", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert [check["name"] for check in report["checks"] if check["status"] == "fail"] == ["prompt 1"]
    assert "error: the smoke test of build/tiny failed: prompt 1" in done.stderr
    assert ET.parse(place.folder / "smoke.xml").getroot().findall(".//failure")
    assert json.loads(place.lpx("inspect", "build/tiny", "--json").stdout)["state"] == "built, not proven"


# inspect ----------------------------------------------------------------------------------------------------------

MODEL_PARAMETERS = 2 * 320 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 2 * 64) + 64


def recipe_is_told(data):
    assert data["recipe"]["limits"]["max_input_len"] == 96


def build_is_told(data):
    assert (data["state"], data["executor"], data["precision"]) == ("built to repository", "paged", "exact")
    assert set(data["stages"]) == {"checkpoint", "engine", "repository"}
    assert data["changed"] == []


def engine_is_told(data):
    assert data["engine"]["executor"] == "paged"
    assert data["engine"]["limits"]["max_seq_len"] == 320


def repository_is_told(data):
    assert set(data["models"]) == {"ensemble", "preprocessing", "postprocessing", "tensorrt_llm"}
    assert data["models"]["tensorrt_llm"]["decoupled"] is True
    assert data["findings"] == []


def checkpoint_is_told(data):
    assert data["parallel"] == {"tensor": 1, "pipeline": 1}
    assert (data["dtype"], data["ranks"][0]["file"]) == ("float32", "rank0.safetensors")
    assert data["ranks"][0]["bytes"] > 4 * MODEL_PARAMETERS


def model_is_told(data):
    assert data["parameters"] == MODEL_PARAMETERS
    assert data["bytes"] == 4 * MODEL_PARAMETERS
    assert data["model"]["executor"]["openvino"] == ["paged"]
    assert data["end_ids"] == [2]


def gguf_is_told(data):
    assert data["config"]["model_type"] == "llama"
    assert data["bytes"] > 0


TOLD = {
    "recipe": ("r.yaml", recipe_is_told),
    "GGUF file": ("tiny.gguf", gguf_is_told),
    "build folder": ("build/tiny", build_is_told),
    "engine": ("build/tiny/engine", engine_is_told),
    "model repository": ("build/tiny/repository", repository_is_told),
    "TensorRT-LLM checkpoint": ("build/tiny/checkpoint", checkpoint_is_told),
    "Hugging Face model folder": ("model", model_is_told),
}


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_inspect_tells_what_a_thing_holds(kind, tiny_place, tmp_path):
    name, told = TOLD[kind]
    path = tiny_place.folder / name
    if kind == "GGUF file":
        test_gguf_small.write_gguf(path := tmp_path / name)
    done = tiny_place.lpx("inspect", path, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["kind"] == kind
    told(data)
    if kind == "engine":
        human = tiny_place.lpx("inspect", path)
        assert human.stdout.splitlines()[1] == f"kind: {kind}"


# init -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path) -> Iterator[str]:
    """Address of a hub that holds the baseline model."""
    hub = Hub()
    hub.add_folder(BASELINE)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("kind", ["folder", "gguf", "hub"])
def test_init_writes_a_recipe_that_builds(kind, tiny_place, tmp_path, hub):
    environment = {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": SECRET}
    place = type(tiny_place)(tmp_path, {**environment, "LPX_CACHE": str(tmp_path / "cache")})
    shutil.copytree(BASELINE, tmp_path / "given")
    source = {"folder": "given", "gguf": "given.gguf", "hub": MODEL}[kind]
    if kind == "gguf":
        test_gguf_small.write_gguf(tmp_path / source)
    made = place.lpx("init", source, "--output", "recipes/first.yaml")
    assert made.returncode == 0, made.stderr
    assert "next: lpx build recipes/first.yaml" in made.stdout
    text = (tmp_path / "recipes" / "first.yaml").read_text()
    assert ("revision: 0123456789abcdef" in text) == (kind == "hub")
    built = place.lpx("build", "recipes/first.yaml", "--to", "checkpoint", "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)["state"] == "built to checkpoint"
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []
