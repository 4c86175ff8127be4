"""What the supervisor and the drain conclude from counters, logs and files, without a server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_model

from lpxbuild.errors import HostError, SourceError
from lpxbuild.server import checks, drain, logs, processes, supervisor
from lpxbuild.server.drain import forsaken
from lpxbuild.server.probes import Traffic
from lpxbuild.server.triton_http import TritonHttp, TritonHttpError


def report(second: int, *models: str) -> str:
    lines = [
        f'I1201 server.cc:321] "Timeout {second}: Found {len(models)} model versions that have in-flight inferences"'
    ]
    lines += [f"I1201 server.cc:325] \"Model '{model}' (version 1) has 1 in-flight inferences\"" for model in models]
    return "\n".join(lines) + "\n"


def test_ensemble_alone_in_flight_is_forsaken():
    ensembles = {"ensemble"}
    alone = report(29, "ensemble") + report(28, "ensemble")
    # The last report may be half written.
    assert not forsaken(alone, ensembles)
    assert forsaken(alone + report(27), ensembles)
    assert not forsaken(report(29, "ensemble", "tensorrt_llm") + report(28, "ensemble") + report(27), ensembles)
    assert not forsaken(report(29, "ensemble") + report(28, "ensemble", "tensorrt_llm") + report(27), ensembles)
    assert not forsaken(report(29, "tensorrt_llm") + report(28, "tensorrt_llm") + report(27), ensembles)
    assert not forsaken("", ensembles)


def test_connections_alone_are_waited_for_only_so_long():
    line = 'I1201 http_server.cc:248] "Timeout {}: Found 2 HTTP service connections"\n'
    assert not drain.only_connections(line.format(29) + line.format(28))
    assert drain.only_connections(line.format(29) + line.format(28) + line.format(27))
    closed = 'I1201 server.cc:305] "Waiting for in-flight requests to complete."\n'
    assert not drain.only_connections(line.format(29) + line.format(28) + line.format(27) + closed)
    assert not drain.only_connections(line.format(29).replace("2 HTTP", "0 HTTP") * 3)


# Writes what Triton writes while it stops, and ends seconds after its last model, as on a host without a free core.
SLOW_TO_END = """
import signal, sys, time

def stop(*_):
    print("All models are stopped, unloading models", flush=True)
    print("successfully unloaded 'a' version 1", flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit(0)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("exit", "status"), [(drain.EXIT_SECONDS, 0), (drain.REPAIRED_EXIT_SECONDS, None)])
def test_end_of_a_slow_server_is_waited_for(tmp_path, exit, status):
    log = tmp_path / "triton.log"
    with log.open("wb") as file, subprocess.Popen([sys.executable, "-c", SLOW_TO_END, "3"], stdout=file) as process:
        try:
            while not log.read_text():
                pass
            arguments = {"bound": 35, "unload": 5, "exit": exit, "repaired": False, "models": {"a"}, "ensembles": set()}
            assert drain.drain(process, log, **arguments, engine_idle=lambda: True)
            assert process.returncode == status
        finally:
            process.kill()


def test_traffic_is_what_others_got():
    traffic = Traffic()
    assert traffic.update({"postprocessing": 5, "tensorrt_llm": 2}) == {"postprocessing", "tensorrt_llm"}
    assert traffic.update({"postprocessing": 5, "tensorrt_llm": 2}) == set()
    # A token in the ensemble is seen at postprocessing, and is one of tensorrt_llm.
    assert traffic.update({"postprocessing": 6, "tensorrt_llm": 2}) == {"postprocessing", "tensorrt_llm"}
    # The supervisor's own probe is neither, before its answer and after it.
    traffic.count_probe("postprocessing")
    assert traffic.update({"postprocessing": 6, "tensorrt_llm": 2}) == set()
    assert traffic.update({"postprocessing": 7, "tensorrt_llm": 2}) == set()
    assert traffic.update({"postprocessing": 8, "tensorrt_llm": 2}) == {"postprocessing", "tensorrt_llm"}
    # Loaded again: counters begin anew, and what they count from then on is traffic.
    traffic.update({"postprocessing": 0, "tensorrt_llm": 2})
    assert traffic.update({"postprocessing": 1, "tensorrt_llm": 2}) == {"postprocessing", "tensorrt_llm"}


@pytest.mark.parametrize(("active", "dead"), [(0, {"tensorrt_llm"}), (1, set())])
def test_silent_model_before_an_idle_engine_is_dead_early(tmp_path, monkeypatch, active, dead):
    """With the periods that users get: 90 s for a probe, which only a long prompt or a queue can need."""
    monkeypatch.setattr(supervisor, "IDLE_ENGINE_SECONDS", 0.1)
    ended = threading.Event()
    server = SimpleNamespace(
        pid=0,
        log_path=tmp_path / "triton.log",
        models={"tensorrt_llm": None},
        client=SimpleNamespace(answers_given=lambda timeout: {}, generate=lambda *_: ended.wait(10)),
        engine_host=SimpleNamespace(stats=lambda timeout: {"active": active}),
    )
    watcher = supervisor.Supervisor(server, supervisor.SupervisorSettings())
    watcher._begin_probe("tensorrt_llm")
    assert watcher._models_silent() == set()
    time.sleep(0.2)
    assert watcher._models_silent() == dead
    ended.set()


def test_useful_lines_leave_out_the_noise_of_a_host_without_gpu(tmp_path):
    log = tmp_path / "triton.log"
    log.write_text(
        "E1201 server.cc:241] CudaDriverHelper has not been initialized.\n"
        "E1201 ensemble_scheduler.cc:1468] unable to create stream for ensemble: CUDA driver version is insufficient\n"
        "E1201 model_lifecycle.cc:642] failed to load 'a' version 1: Internal: ValueError: no\n"
        "| a | 1 | UNAVAILABLE |\n"
    )
    assert logs.last_useful_lines(log) == [
        "E1201 model_lifecycle.cc:642] failed to load 'a' version 1: Internal: ValueError: no"
    ]
    log.write_text("nothing of note\n")
    assert logs.last_useful_lines(log) == ["nothing of note"]
    assert logs.last_useful_lines(tmp_path / "absent.log") == []


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda engine: (engine / "openvino_model.bin").unlink(), r"openvino_model\.bin"),
        (lambda engine: (engine / "openvino_model.xml").write_text(""), r"openvino_model\.xml is empty"),
        (lambda engine: (engine / "engine.json").write_text("{"), "damaged"),
        (lambda engine: (engine / "engine.json").write_text('{"format_version": 2}'), "format_version 2"),
    ],
)
def test_engine_that_cannot_be_read(tiny_engine, tmp_path, damage, message):
    repository = tiny_model.build_repository(tiny_engine, tmp_path / "repository")
    checks.check_engine(repository)
    engine = repository / "tensorrt_llm" / "1" / "engine"
    for path in engine.iterdir():
        # Large files share their bytes with the engine that they come from: break the copy only.
        if path.is_file():
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    damage(engine)
    with pytest.raises(SourceError, match=message):
        checks.check_engine(repository)


def test_log_lines_are_taken_whole(tmp_path):
    log = tmp_path / "triton.log"
    line = b"E1201 Stub process 'tensorrt_llm_0_0' is not healthy.\n"
    log.write_bytes(b"\xff" * 40 + b"\n" + line[:20])
    text, position = logs.whole_lines_from(log, 0)
    # Bytes that are no UTF-8 count as they lie there, and a half-written line waits for its end.
    assert position == 41
    assert "Stub" not in text
    with log.open("ab") as file:
        file.write(line[20:])
    text, position = logs.whole_lines_from(log, position)
    assert text == line.decode()
    assert position == log.stat().st_size
    assert logs.whole_lines_from(tmp_path / "none", 7) == ("", 7)


def test_a_supervisor_that_fails_says_so(monkeypatch):
    watched = supervisor.Supervisor(
        SimpleNamespace(pid=0, log_path=Path("/nowhere")), supervisor.SupervisorSettings(poll=0.01)
    )
    monkeypatch.setattr(watched, "_look", lambda: {}["absent"])
    watched.start()
    deadline = time.monotonic() + 5
    while watched.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "KeyError" in str(watched.error)


def test_a_process_with_half_a_letter_in_its_name_is_read(tmp_path):
    """The kernel cuts names at 15 bytes, wherever that is."""
    program = tmp_path / "abcdefghijklmnü"
    program.symlink_to(shutil.which("sleep"))
    with subprocess.Popen([program, "5"]) as process:
        assert processes.alive(process.pid)
        assert processes.all_states()
        process.kill()


def test_shared_memory_that_cannot_be_written_is_a_lack_of_the_host(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    with pytest.raises(HostError, match="cannot be used"):
        checks.check_shared_memory({}, folder=tmp_path)


def test_an_answer_that_is_not_json_is_an_error_of_the_server(monkeypatch):
    client = TritonHttp("127.0.0.1:1")
    monkeypatch.setattr(TritonHttp, "_call", lambda *_arguments, **_options: b"<html>")
    for call in (lambda: client.model_states(1), lambda: client.answers_given(1), lambda: client.load("m", 1)):
        with pytest.raises(TritonHttpError, match="not JSON"):
            call()


@pytest.mark.parametrize(("limits", "answer"), [("-Sn 64", "512"), ("-n 64", "only 64 open files")])
def test_too_few_open_files_are_raised_or_refused(limits, answer):
    code = (
        "import resource\n"
        "from lpxbuild.errors import HostError\n"
        "from lpxbuild.server.checks import check_open_files\n"
        "try:\n"
        "    check_open_files()\n"
        "    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "except HostError as error:\n"
        "    print(error)\n"
    )
    command = ["bash", "-c", f'ulimit {limits}; exec "$0" -c "$1"', sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer in done.stdout
