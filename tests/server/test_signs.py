"""What the supervisor and the drain conclude from counters, logs and files, without a server."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiny_model

from lpxbuild.errors import SourceError
from lpxbuild.server import checks, drain, logs
from lpxbuild.server.drain import forsaken
from lpxbuild.server.probes import Traffic


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
            arguments = {"bound": 35, "unload": 5, "exit": exit, "models": {"a"}, "ensembles": set()}
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
