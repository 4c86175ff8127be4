"""`serve` in the foreground and detached: signals, drain, stop, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from traces import wait_until

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.server import ServerSettings, detach, read_status, serve, serving, stop
from lpxbuild.server.triton_http import TritonHttp, TritonHttpError

STREAM = {"text_input": "abc", "max_tokens": 30, "stream": True, "exclude_input_in_output": True}


@pytest.fixture
def foreground(slow_repository, tmp_path, traces):
    """`serve` in a process of its own; returns (process, status of server.json)."""
    processes = []

    def begin(*, wait: bool = True, drain_seconds: int = 10):
        program = (
            "import sys\nfrom pathlib import Path\nfrom lpxbuild.output import Output\n"
            "from lpxbuild.server import ServerSettings, serve\n"
            f"settings = ServerSettings(drain_seconds={drain_seconds})\n"
            f"sys.exit(serve(Path({str(slow_repository)!r}), state=Path({str(tmp_path / 'state')!r}), "
            "settings=settings, output=Output('human')))\n"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        if not wait:
            return process, {}
        status = wait_until(
            lambda: (s := read_status(tmp_path / "state")) and s["state"] == "ready" and s, 30, "server ready"
        )
        traces.prefixes.add(status["shm_prefix"])
        return process, status

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def test_sigterm_lets_a_running_stream_finish(foreground, tmp_path):
    process, status = foreground()
    events = TritonHttp(status["http_url"]).generate_stream("ensemble", STREAM, timeout=10)
    texts = [next(events)["text_output"]]
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    texts += [event["text_output"] for event in events]
    assert "".join(texts) == "abc" * 10
    assert process.wait(20) == 143
    # 3 s of tokens, the unloading of five models; nowhere near the drain's own limit of 15.
    assert time.monotonic() - started < 14
    assert read_status(tmp_path / "state") is None
    assert not (tmp_path / "state" / "server.json").exists()


def test_drain_ends_at_its_bound(foreground):
    process, status = foreground(drain_seconds=1)
    events = TritonHttp(status["http_url"]).generate_stream("ensemble", {**STREAM, "max_tokens": 200}, timeout=10)
    next(events)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    with pytest.raises(TritonHttpError):
        list(events)
    assert process.wait(20) == 143
    # drain_seconds + 5, and a little for the clean-up.
    assert time.monotonic() - started < 9


def test_second_signal_ends_at_once(foreground):
    process, status = foreground(drain_seconds=30)
    events = TritonHttp(status["http_url"]).generate_stream("ensemble", {**STREAM, "max_tokens": 200}, timeout=10)
    next(events)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert time.monotonic() - started < 5
    with pytest.raises(TritonHttpError):
        list(events)


def test_signal_while_starting(foreground, tmp_path):
    process, _ = foreground(wait=False)
    wait_until(lambda: read_status(tmp_path / "state"), 20, "starting")
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 130
    assert "stopped while starting" in process.stderr.read()
    assert read_status(tmp_path / "state") is None


def test_server_that_dies_ends_lpx(foreground):
    process, status = foreground()
    os.kill(status["triton_pid"], signal.SIGKILL)
    assert process.wait(15) != 0
    assert "tritonserver ended with signal SIGKILL" in process.stderr.read()


def test_detach_and_stop(slow_repository, tmp_path, traces):
    state = tmp_path / "state"
    settings = ServerSettings(drain_seconds=10)
    status = detach(slow_repository, state=state, settings=settings)
    traces.prefixes.add(status["shm_prefix"])
    try:
        assert status == json.loads((state / "server.json").read_text())
        assert status["state"] == "ready"
        assert status["pid"] != os.getpid()
        assert Path(status["log"]).read_text()
        client = TritonHttp(status["http_url"])
        body = {"text_input": "abc", "max_tokens": 3, "exclude_input_in_output": True}
        assert client.generate("ensemble", body, 10)["text_output"] == "abc"
        with pytest.raises(HostError, match=f"served already by pid {status['pid']}"):
            detach(slow_repository, state=state, settings=settings)
        # The refused one has taken nothing away.
        assert read_status(state) == status
    finally:
        assert stop(state)
    assert read_status(state) is None
    assert not stop(state)


def test_stop_after_its_process_was_killed(slow_repository, tmp_path, traces):
    state = tmp_path / "state"
    status = detach(slow_repository, state=state, settings=ServerSettings(drain_seconds=2))
    traces.prefixes.add(status["shm_prefix"])
    os.kill(status["pid"], signal.SIGKILL)
    # The guard ends the rest; a status file of a dead process is no server.
    wait_until(lambda: not Path(status["engine_directory"]).exists(), 15, "cleaned up")
    assert read_status(state) is None
    assert not stop(state)
    # And the build can be served again.
    again = detach(slow_repository, state=state, settings=ServerSettings(drain_seconds=2))
    traces.prefixes.add(again["shm_prefix"])
    assert stop(state)


def test_detached_failure_is_told(tmp_path, traces):
    with pytest.raises(SourceError, match="not a Triton model repository"):
        detach(tmp_path / "nothing", state=tmp_path / "state", output=Output.quiet())
    assert read_status(tmp_path / "state") is None


def test_second_start_of_a_build_that_is_being_started(foreground, slow_repository, tmp_path):
    process, _ = foreground(wait=False)
    wait_until(lambda: read_status(tmp_path / "state"), 20, "starting")
    with pytest.raises(HostError, match=f"this build is being started already by pid {process.pid}"):
        serve(slow_repository, state=tmp_path / "state", output=Output.quiet())
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 143


@pytest.mark.parametrize("how", [serve, detach])
def test_state_folder_that_cannot_be_written(tmp_path, how):
    (tmp_path / "home").write_text("a file, so that not even root can make a folder in it")
    with pytest.raises(HostError, match=r"home/state cannot be written: Not a directory"):
        how(tmp_path, state=tmp_path / "home" / "state", output=Output.quiet())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_within_an_import_is_a_stop(tmp_path, monkeypatch, number):
    def start(*_, **__):
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except BaseException as error:
            # As numpy's C code does.
            raise ImportError("numpy._core.umath failed to import") from error

    monkeypatch.setattr(serving, "start", start)
    output = Output.quiet()
    assert serve(tmp_path, state=tmp_path / "state", output=output) == 128 + number
    assert output.notices == ["stopped while starting"]
    assert read_status(tmp_path / "state") is None


def test_failure_without_a_signal_stays_a_failure(tmp_path, monkeypatch):
    def start(*_, **__):
        raise ImportError("no such module")

    monkeypatch.setattr(serving, "start", start)
    with pytest.raises(ImportError, match="no such module"):
        serve(tmp_path, state=tmp_path / "state", output=Output.quiet())
