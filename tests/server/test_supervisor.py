"""Dead or busy: the supervisor repairs the first and leaves the second alone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import echo_repository
import pytest
import tiny_model
from traces import wait_until

from lpxbuild.errors import ToolError
from lpxbuild.server import ServerSettings, SupervisorSettings, processes, start
from lpxbuild.server.supervisor import stubs_of
from lpxbuild.server.triton_http import TritonHttpError

pytestmark = pytest.mark.usefixtures("plain_repository")

QUICK = SupervisorSettings(poll=0.1, probe_every=1.0, probe_timeout=3.0)
ANSWER = "abcabca"


def answers(server) -> bool:
    try:
        body = {"text_input": "abc", "max_tokens": 7, "exclude_input_in_output": True}
        return server.client.generate("ensemble", body, 10)["text_output"] == ANSWER
    except TritonHttpError:
        return False


@pytest.fixture
def served(tmp_path, traces):
    """Start a stand-in repository; stopped at the end, however the test went."""
    running = []

    def begin(*, supervisor=QUICK, **options):
        repository = echo_repository.make(tmp_path / "repository", **options)
        settings = ServerSettings(supervisor=supervisor, drain_seconds=5)
        server = start(repository, log_path=tmp_path / "triton.log", settings=settings)
        running.append(server)
        traces.prefixes.add(server.runtime.shm_prefix)
        return server

    yield begin
    for server in running:
        server.stop()


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing"])
def test_idle_model_that_died_is_loaded_again(served, model):
    server = served()
    before = stubs_of(server.pid)
    os.kill(before[f"{model}_0_0"], signal.SIGKILL)
    wait_until(lambda: server.repairs, 10, f"{model} repaired")
    assert server.repairs == [model]
    assert answers(server)
    after = stubs_of(server.pid)
    # That model alone: the processes of the others are the same as before.
    assert {name for name in before if before[name] != after[name]} == {f"{model}_0_0"}
    # After a repair Triton does not get through its unloading; the stop must not wait for all of its time.
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 10


def test_model_that_dies_while_streaming_and_again_after_the_repair(served):
    server = served(token_delay=0.05)
    for times in (1, 2):
        body = {"text_input": "abc", "max_tokens": 200, "stream": True}
        events = server.client.generate_stream("ensemble", body, timeout=2)
        assert [next(events)["text_output"] for _ in range(3)] == ["a", "b", "c"]
        os.kill(stubs_of(server.pid)["tensorrt_llm_0_0"], signal.SIGKILL)
        wait_until(lambda: len(server.repairs) == times, 10, "repaired")  # noqa: B023
        # The broken stream ends for its client by its own limit on silence, or with Triton's error; never by itself.
        with pytest.raises(TritonHttpError):
            list(events)
        assert wait_until(lambda: answers(server), 10, "answers again")
    assert server.repairs == ["tensorrt_llm"] * 2


def test_model_that_hangs_is_found_by_a_probe(served):
    server = served()
    pid = stubs_of(server.pid)["postprocessing_0_0"]
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: server.repairs, 20, "repaired")
        assert server.repairs == ["postprocessing"]
        assert wait_until(lambda: answers(server), 10, "answers again")
    finally:
        if processes.alive(pid):
            os.kill(pid, signal.SIGCONT)


def saturate(repository, log_path, traces, seconds: float) -> None:
    """64 requests before an engine that makes one token each second, and a supervisor that probes every second."""
    tiny_model.make_replay(repository, {}, delay=1.0, at_once=1)
    settings = ServerSettings(supervisor=QUICK, drain_seconds=5, warmup_prompts=0)
    body = {"text_input": "abc", "max_tokens": 4, "stream": True}
    got = []
    with start(repository, log_path=log_path, settings=settings) as server:
        traces.prefixes.add(server.runtime.shm_prefix)

        def client() -> None:
            # The server is stopped under the queue at the end.
            with contextlib.suppress(TritonHttpError):
                got.extend(server.client.generate_stream("ensemble", body, timeout=seconds * 4))

        threads = [threading.Thread(target=client, daemon=True) for _ in range(64)]
        before, began = server.engine_host.stats(timeout=5)["tokens_total"], time.monotonic()
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        stats = server.engine_host.stats(timeout=5)
        elapsed = time.monotonic() - began
        assert server.repairs == []
        assert server.error is None
        # A token a second was made all the time, and nobody was thrown out of the queue.
        assert elapsed * 0.7 <= stats["tokens_total"] - before <= elapsed + 2
        assert stats["active"] >= 64 - elapsed / 4 - 1
        server.kill()
    for thread in threads:
        thread.join(10)


@pytest.mark.slow  # 20 s of waiting is the test: a busy server must not be taken for a dead one
def test_saturated_server_is_not_dead(slow_repository, tmp_path, traces):
    saturate(slow_repository, tmp_path / "triton.log", traces, 20)


@pytest.mark.full
def test_saturated_server_is_not_dead_for_three_minutes(slow_repository, tmp_path, traces):
    saturate(slow_repository, tmp_path / "triton.log", traces, 180)


@pytest.fixture
def engine_server(slow_repository, tmp_path, traces):
    """Real stubs and a real engine host, with scripted tokens."""
    settings = ServerSettings(supervisor=QUICK, drain_seconds=5)
    with start(slow_repository, log_path=tmp_path / "triton.log", settings=settings) as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        yield server


def stream_of(server, length: int):
    body = {"text_input": "abc", "max_tokens": length, "stream": True, "exclude_input_in_output": True}
    return server.client.generate_stream("ensemble", body, timeout=5)


@pytest.mark.parametrize("victim", ["engine host", "tensorrt_llm", "postprocessing"])
def test_death_while_streaming_is_repaired(engine_server, victim):
    """Whoever dies: its streams end with an error, new requests are answered, and it can die again."""
    server = engine_server
    for times in (1, 2):
        events = stream_of(server, 60)
        next(events)
        pid = server.engine_host.pid if victim == "engine host" else stubs_of(server.pid)[f"{victim}_0_0"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(TritonHttpError):
            list(events)
        wait_until(lambda: len(server.repairs) >= times, 20, "repaired")  # noqa: B023
        wait_until(lambda: answers(server), 20, "answers again")
        assert server.repairs == [victim] * times
    # One engine host, and nobody else's.
    assert server.engine_host.alive()
    # Without its postprocessing, a generation of Triton's ensemble still runs to its end; the others end at once.
    wait_until(lambda: server.engine_host.stats(timeout=5)["active"] == 0, 15, "engine free")


def test_engine_host_that_hangs_is_replaced(engine_server):
    server = engine_server
    hung = server.engine_host.pid
    os.kill(hung, signal.SIGSTOP)
    try:
        wait_until(lambda: server.repairs, 40, "repaired")
        assert server.repairs == ["engine host"]
        assert server.engine_host.pid != hung
        wait_until(lambda: answers(server), 20, "answers again")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(hung, signal.SIGCONT)


def test_model_loaded_by_somebody_else_is_not_dead(served):
    server = served()
    server.client.load("postprocessing", 20)
    time.sleep(1.5)
    assert server.repairs == []
    assert answers(server)


def test_server_that_dies_is_told_with_its_signal(served):
    server = served()
    os.kill(server.pid, signal.SIGSEGV)
    error = wait_until(lambda: server.error, 10, "death noticed")
    assert isinstance(error, ToolError)
    assert "SIGSEGV" in error.what
    assert str(server.log_path) in error.why


def test_model_that_dies_over_and_over_is_given_up(served):
    server = served(supervisor=SupervisorSettings(poll=0.1, most_repairs=2))
    for _ in range(3):
        known = len(server.repairs)
        os.kill(stubs_of(server.pid)["preprocessing_0_0"], signal.SIGKILL)
        wait_until(lambda: len(server.repairs) > known or server.error, 10, "repair or error")  # noqa: B023
    assert "preprocessing died 3 times" in str(server.error)
