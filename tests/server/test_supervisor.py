"""Dead or busy: the supervisor repairs the first and leaves the second alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import threading
import time

import echo_repository
import pytest
import tiny_model
from traces import nothing_left, wait_until

from lpxbuild.errors import ToolError
from lpxbuild.server import ServerSettings, SupervisorSettings, embedded, processes, start
from lpxbuild.server.supervisor import stubs_of
from lpxbuild.server.triton_http import TritonHttpError

QUICK = SupervisorSettings(poll=0.1, probe_every=1.0, probe_timeout=3.0, most_repairs=100)
ANSWER = "abcabca"


def answers(server, model: str = "ensemble") -> bool:
    try:
        body = {"text_input": "abc", "max_tokens": 7, "exclude_input_in_output": True}
        return server.client.generate(model, body, 10)["text_output"] == ANSWER
    except TritonHttpError:
        return False


@pytest.fixture(scope="module")
def server(tiny_engine, tmp_path_factory):
    """One server for everything that is repaired: real stubs, a real engine host, scripted tokens (10 a second)."""
    place = tmp_path_factory.mktemp("supervised")
    repository = tiny_model.make_replay(tiny_model.build_repository(tiny_engine, place / "repository"), {}, delay=0.1)
    settings = ServerSettings(supervisor=QUICK, drain_seconds=30)
    with nothing_left() as shm:
        with start(repository, log_path=place / "triton.log", settings=settings) as running:
            shm.prefixes.add(running.runtime.shm_prefix)
            yield running
            started = time.monotonic()
        # After a repair Triton does not get through its unloading; the stop must not wait for all of its time.
        assert not running.repairs or time.monotonic() - started < 12


def repaired(server, before: int, names: list[str], seconds: float) -> None:
    """Wait for these repairs, in this order and no others, and for an answer after them."""
    wait_until(lambda: len(server.repairs) >= before + len(names), seconds, f"repaired {names}")
    wait_until(lambda: answers(server), 20, "answers again")
    assert server.repairs[before:] == names
    assert server.error is None


BLS = pytest.param(
    "tensorrt_llm_bls",
    marks=pytest.mark.skipif(not embedded.bls_is_safe(), reason="tensorrt_llm_bls is served on Python 3.11 only"),
)


@pytest.mark.parametrize("model", ["preprocessing", "tensorrt_llm", "postprocessing", BLS])
def test_idle_model_that_died_is_loaded_again(server, model):
    before, stubs = len(server.repairs), stubs_of(server.pid)
    os.kill(stubs[f"{model}_0_0"], signal.SIGKILL)
    repaired(server, before, [model], 10)
    after = stubs_of(server.pid)
    # That model alone: the processes of the others are the same as before.
    assert {name for name in stubs if stubs[name] != after[name]} == {f"{model}_0_0"}
    if model == "tensorrt_llm_bls":
        assert answers(server, model)


@pytest.mark.parametrize("victim", ["engine host", "tensorrt_llm", "postprocessing"])
def test_death_while_streaming_is_repaired(server, victim):
    """Whoever dies: its stream does not end as if it were whole, and new requests are answered."""
    before = len(server.repairs)
    body = {"text_input": "abc", "max_tokens": 30, "stream": True, "exclude_input_in_output": True}
    events = server.client.generate_stream("ensemble", body, timeout=3)
    next(events)
    pid = server.engine_host.pid if victim == "engine host" else stubs_of(server.pid)[f"{victim}_0_0"]
    os.kill(pid, signal.SIGKILL)
    # An error, or silence until the client's own limit.
    with pytest.raises(TritonHttpError):
        list(events)
    repaired(server, before, [victim], 20)
    # Without its postprocessing, a generation of Triton's ensemble still runs to its end; the others end at once.
    wait_until(lambda: server.engine_host.stats(timeout=5)["active"] == 0, 15, "engine free")


@pytest.mark.skipif(not embedded.bls_is_safe(), reason="tensorrt_llm_bls is served on Python 3.11 only")
def test_death_of_the_bls_model_while_it_streams_is_repaired(server):
    before = len(server.repairs)
    body = {"text_input": "abc", "max_tokens": 30, "stream": True, "exclude_input_in_output": True}
    events = server.client.generate_stream("tensorrt_llm_bls", body, timeout=3)
    next(events)
    os.kill(stubs_of(server.pid)["tensorrt_llm_bls_0_0"], signal.SIGKILL)
    with pytest.raises(TritonHttpError):
        list(events)
    # tensorrt_llm hangs then, on an answer that the dead process was to take: it is noticed and repaired too.
    repaired(server, before, ["tensorrt_llm_bls", "tensorrt_llm"], 40)
    assert answers(server, "tensorrt_llm_bls")
    wait_until(lambda: server.engine_host.stats(timeout=5)["active"] == 0, 15, "engine free")


def test_engine_host_that_hangs_is_replaced(server):
    before, hung = len(server.repairs), server.engine_host.pid
    os.kill(hung, signal.SIGSTOP)
    repaired(server, before, ["engine host"], 40)
    assert server.engine_host.pid != hung
    assert not processes.alive(hung)


def test_model_that_hangs_is_loaded_again(server):
    before, hung = len(server.repairs), stubs_of(server.pid)["preprocessing_0_0"]
    os.kill(hung, signal.SIGSTOP)
    try:
        repaired(server, before, ["preprocessing"], 40)
    finally:
        if processes.alive(hung):
            os.kill(hung, signal.SIGCONT)


def test_model_loaded_by_somebody_else_is_not_dead(server):
    before, stub = len(server.repairs), stubs_of(server.pid)["postprocessing_0_0"]
    server.client.load("postprocessing", 20)
    time.sleep(1.5)
    assert stubs_of(server.pid)["postprocessing_0_0"] != stub
    assert len(server.repairs) == before
    assert answers(server)


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
        stop_in_time(server, settings.drain_seconds)
    for thread in threads:
        thread.join(10)
    assert traces.left() == []


def stop_in_time(server, drain_seconds: float) -> None:
    """The stop of a server with a full queue: within its bound (and a little for the clean-up), and nothing is left."""
    engine_host, began = server.engine_host.pid, time.monotonic()
    server.stop()
    assert time.monotonic() - began < drain_seconds + 5 + 2
    assert processes.in_group(server.pid) == []
    assert not processes.alive(engine_host)


@pytest.mark.slow  # 12 s of waiting is the test: a busy server must not be taken for a dead one
def test_saturated_server_is_not_dead(slow_repository, tmp_path, traces):
    saturate(slow_repository, tmp_path / "triton.log", traces, 12)


@pytest.mark.full
def test_saturated_server_is_not_dead_for_three_minutes(slow_repository, tmp_path, traces):
    saturate(slow_repository, tmp_path / "triton.log", traces, 180)


@pytest.mark.slow  # longer than the 15 s after which a silent model is probed, with the periods that users get
def test_full_real_engine_under_the_default_supervisor(tmp_path, traces):
    """64 clients before an engine that runs one request at a time, each with its next request at once."""
    source = tiny_model.make_source(tmp_path / "source")
    engine = tiny_model.build_engine(source, tmp_path / "built", max_batch_size=1)
    assert json.loads((engine / "engine.json").read_text())["scheduler"]["max_num_seqs"] == 1
    repository = tiny_model.build_repository(engine, tmp_path / "repository", max_batch_size=1)
    settings = ServerSettings(drain_seconds=5)
    assert settings.supervisor == SupervisorSettings()
    body = {"text_input": "abc", "max_tokens": 200, "stream": True}
    ended, busy = threading.Event(), []
    with start(repository, log_path=tmp_path / "triton.log", settings=settings) as server:
        traces.prefixes.add(server.runtime.shm_prefix)

        def client() -> None:
            with contextlib.suppress(TritonHttpError):
                while not ended.is_set():
                    list(server.client.generate_stream("ensemble", body, timeout=120))

        threads = [threading.Thread(target=client, daemon=True) for _ in range(64)]
        for thread in threads:
            thread.start()
        tokens = [server.engine_host.stats(timeout=5)["tokens_total"]]
        for _ in range(9):
            time.sleep(2)
            stats = server.engine_host.stats(timeout=5)
            tokens.append(stats["tokens_total"])
            busy.append(stats["active"])
        assert min(busy[1:]) >= 32, busy
        # Tokens were made in each of these two seconds: nobody was loaded again and nothing stood still.
        assert all(later > earlier for earlier, later in itertools.pairwise(tokens))
        assert server.repairs == []
        assert server.error is None
        ended.set()
        stop_in_time(server, settings.drain_seconds)
    for thread in threads:
        thread.join(10)
    assert traces.left() == []


@pytest.fixture
def served(tmp_path, traces, plain_repository):
    """Serve a stand-in for a test that ruins its server."""
    running = []

    def begin(supervisor: SupervisorSettings):
        repository = echo_repository.make(tmp_path / "repository")
        settings = ServerSettings(supervisor=supervisor, drain_seconds=5)
        one = start(repository, log_path=tmp_path / "triton.log", settings=settings)
        running.append(one)
        traces.prefixes.add(one.runtime.shm_prefix)
        return one

    yield begin
    for one in running:
        one.stop()


def test_server_that_dies_is_told_with_its_signal(served):
    server = served(QUICK)
    os.kill(server.pid, signal.SIGSEGV)
    error = wait_until(lambda: server.error, 10, "death noticed")
    assert isinstance(error, ToolError)
    assert "SIGSEGV" in error.what
    assert str(server.log_path) in error.why


def test_model_that_dies_over_and_over_is_given_up(served):
    server = served(SupervisorSettings(poll=0.1, most_repairs=2))
    for _ in range(3):
        known = len(server.repairs)
        os.kill(stubs_of(server.pid)["preprocessing_0_0"], signal.SIGKILL)
        wait_until(lambda: len(server.repairs) > known or server.error, 10, "repair or error")  # noqa: B023
    assert "preprocessing died 3 times" in str(server.error)
