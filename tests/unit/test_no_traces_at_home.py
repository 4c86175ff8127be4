"""Nothing that lpx starts writes into the home folder: OpenVINO's telemetry would leave an `intel` folder there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import CASES, MODEL_REPO

import engine_protocol as protocol  # isort: skip
from tiny_engine import write_engine  # isort: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def environment(home: Path, **more: str) -> dict[str, str]:
    """As a user's: without the variables by which the tests keep OpenVINO quiet, or that name other folders."""
    names = ("CI", "DO_NOT_TRACK", "LPX_CACHE", "XDG_CACHE_HOME", protocol.DIRECTORY_VARIABLE)
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "HOME": str(home), **more}


def test_openvino_alone_would_write_there(home: Path) -> None:
    """What the other tests guard against is real, or they would show nothing; the network is switched off for it."""
    script = "import socket; socket.socket.connect = None; import openvino"
    subprocess.run([sys.executable, "-c", script], env=environment(home), check=True, timeout=60)
    assert [path.name for path in home.iterdir()] == ["intel"]


def test_the_engine_host_writes_nothing(home: Path, tmp_path: Path) -> None:
    engine, sockets = write_engine(tmp_path / "engine"), tmp_path / "sockets"
    command = [sys.executable, str(MODEL_REPO / "tensorrt_llm" / "engine_host.py"), "--engine", str(engine)]
    process = subprocess.Popen([*command, "--socket-dir", str(sockets), "--keep"], env=environment(home))
    try:
        deadline = time.monotonic() + 60
        while not (sockets / protocol.SOCKET_NAME).exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
    assert list(home.iterdir()) == []


def test_a_build_writes_nothing(home: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        f"name: tiny\nmodel: {{source: {CASES / 'baseline'}}}\nbackend: openvino\n"
        "limits: {max_batch_size: 2, max_input_len: 64, max_seq_len: 96, max_num_tokens: 64}\n"
        "runtime: {kv_cache_gib: 0.01}\n"
    )
    command = [sys.executable, "-m", "lpxbuild", "build", str(recipe), "--to", "repository"]
    done = subprocess.run(
        command,
        env=environment(home, LPX_CACHE=str(tmp_path / "cache")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "build" / "tiny" / "repository" / "tensorrt_llm").is_dir()
    assert list(home.iterdir()) == []
