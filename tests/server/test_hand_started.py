"""A repository copied elsewhere, lpx uninstalled, tritonserver started by hand: still serves, and leaves nothing."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from traces import TEST_MARK, processes_with, wait_until

from lpxbuild.server import checks, embedded
from lpxbuild.server.triton_http import TritonHttp

BODY = {"text_input": "abc", "max_tokens": 12, "exclude_input_in_output": True}


@pytest.fixture
def place():
    """A folder with a short path: the engine host's socket is below it."""
    folder = Path(tempfile.mkdtemp(prefix="lpx-hand-"))
    yield folder
    shutil.rmtree(folder)


def python_without_lpx(folder: Path) -> Path:
    """A virtual environment with the packages of this one, but lpx; returns its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    packages = next(folder.glob("lib/python3*/site-packages"))
    # A folder named by a .pth file is searched, but the .pth files in it, such as that of an editable lpx, are not.
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    python = folder / "bin" / "python3"
    tried = subprocess.run(
        [python, "-c", "import tokenizers, lpxbuild.errors"],
        cwd=folder,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if tried.returncode == 0:
        pytest.skip("lpx is installed as a wheel here and cannot be hidden")
    assert "No module named 'lpxbuild" in tried.stderr
    return python.parent


def test_copied_repository_serves_without_lpx(tiny_repository, tiny_server, place, traces):
    repository = place / "elsewhere" / "models"
    shutil.copytree(tiny_repository, repository)
    home = place / "home"
    home.mkdir()
    (place / "tmp").mkdir()
    server = embedded.find()
    mark, prefix = os.environ[TEST_MARK], f"lpxhand{secrets.token_hex(4)}_"
    traces.prefixes.add(prefix)
    ports = checks.choose_ports({"http": 0, "grpc": 0, "metrics": 0}, "127.0.0.1")
    command = [
        server.binary,
        f"--model-repository={repository}",
        f"--backend-directory={server.backends}",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        *(f"--{name}-port={port}" for name, port in ports.items()),
        *(f"--{name}-address=127.0.0.1" for name in ports),
    ]
    if not embedded.bls_is_safe():
        shutil.rmtree(repository / "tensorrt_llm_bls", ignore_errors=True)
    environment = {
        "PATH": f"{python_without_lpx(place / 'python')}:/usr/bin:/bin",
        "LD_LIBRARY_PATH": server.library_path,
        "HOME": str(home),
        "TMPDIR": str(place / "tmp"),
        TEST_MARK: mark,
    }
    log = place / "triton.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=file, stderr=file)
    try:
        client = TritonHttp(f"127.0.0.1:{ports['http']}")
        wait_until(lambda: client.is_ready() or process.poll() is not None, 60, "ready")
        assert process.poll() is None, log.read_text()
        expected = tiny_server.client.generate("ensemble", BODY, 20)["text_output"]
        assert client.generate("ensemble", BODY, 20)["text_output"] == expected
        pieces = [event["text_output"] for event in client.generate_stream("ensemble", BODY | {"stream": True}, 20)]
        assert "".join(pieces) == expected
        assert [text for text in processes_with(TEST_MARK, mark) if "engine_host.py" in text]
        process.send_signal(signal.SIGTERM)
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()
    # The engine host was started by the first model, and ends some seconds after the last one has gone.
    wait_until(lambda: not processes_with(TEST_MARK, mark), 15, "engine host gone")
    assert list(home.iterdir()) == []
