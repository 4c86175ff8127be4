"""The smoke test: passes on what works, fails on what does not, and never hangs."""

from __future__ import annotations

import importlib
import socket
import threading
import time
from xml.etree import ElementTree

import echo_repository
import pytest
import tiny_model

from lpxbuild.server import ServerSettings, start
from lpxbuild.smoke import Check, Endpoints, SmokePrompt, SmokeReport, run, running, service_checks
from lpxbuild.smoke.cancellation_checks import Outcome, judge
from lpxbuild.smoke.client import TritonClient
from lpxbuild.smoke.registry import CHECKS, CheckFailed, Skipped

ALWAYS = {
    "liveness",
    "metadata",
    "unary",
    "streaming",
    "unequal batch",
    "stop words",
    "unicode round trip",
    "max_tokens 1",
    "over-long prompt",
    "wrong type",
    "wrong shape",
    "concurrent requests",
    "seed",
    "bls equals ensemble",
    "cancel a direct stream",
    "stop an ensemble stream by its id",
}


def by_name(report: SmokeReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def test_streaming_repository_passes(tiny_server, tiny_repository, triton):
    text = triton.text({"text_input": "abc", "max_tokens": 8, "exclude_input_in_output": True})
    prompts = [
        SmokePrompt(text="abc", max_tokens=8, expect=text),
        {"text": "abc", "messages": None, "max_tokens": 8, "expect": "no such text"},
        {"text": None, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "expect": None},
    ]
    endpoints = Endpoints(tiny_server.http_url, tiny_server.grpc_url)
    report = run(endpoints, repository=tiny_repository, prompts=prompts, idle=20)
    checks = by_name(report)
    assert {name: checks[name].detail for name in ALWAYS if checks[name].status != "pass"} == {}
    # Triton's own limit is told, not counted as passed.
    assert checks["cancel an ensemble stream"].status == "note"
    assert "not passed on by Triton" in checks["cancel an ensemble stream"].detail
    assert checks["prompt 1"].status == "pass"
    assert checks["prompt 2"].status == "fail"
    assert "no such text" in checks["prompt 2"].detail
    assert checks["prompt 3"].status == "pass", checks["prompt 3"]
    assert not report.ok
    assert [check.name for check in report.failed] == ["prompt 2"]
    assert run(endpoints, repository=tiny_repository, idle=20).ok


def test_repository_without_streaming_passes(tiny_engine, tmp_path, traces):
    """Not decoupled: plain HTTP infer works, stream=true is refused with the key that would allow it."""
    repository = tiny_model.build_repository(tiny_engine, tmp_path / "repository", decoupled=False)
    with start(repository, log_path=tmp_path / "triton.log") as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        report = run(Endpoints(server.http_url, server.grpc_url), repository=repository, idle=20)
    checks = by_name(report)
    skipped = {name for name, check in checks.items() if check.status == "skip"}
    assert skipped == {"cancel a direct stream", "stop an ensemble stream by its id", "cancel an ensemble stream"}
    assert report.failed == ()
    assert "serve.streaming" in checks["streaming"].detail


CANCELLATIONS = ("cancel a direct stream", "stop an ensemble stream by its id", "cancel an ensemble stream")


def only(monkeypatch, *names: str) -> None:
    """Run these checks and no others."""
    for module in ("service_checks", "generation_checks", "cancellation_checks"):
        importlib.import_module(f"lpxbuild.smoke.{module}")
    monkeypatch.setattr(running, "CHECKS", {name: function for name, function in CHECKS.items() if name in names})


def test_engine_that_cannot_be_asked(tiny_server, tmp_path, monkeypatch):
    """On lpx's own server the engine must answer, or nothing is known about cancellation; elsewhere that is said."""
    only(monkeypatch, *CANCELLATIONS)
    urls = (tiny_server.http_url, tiny_server.grpc_url)
    for check in run(Endpoints(*urls, engine_directory=tmp_path), idle=20).checks:
        assert (check.status, "no engine host answers" in check.detail) == ("fail", True)
    monkeypatch.setattr(running, "_engine_directory", lambda _url: None)
    for check in run(Endpoints(*urls), idle=20).checks:
        assert (check.status, "not measurable" in check.detail) == ("skip", True)


class Engine:
    """Outcomes of cancels, one after the other; remembers what was asked for."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, length: int, responses: int) -> Outcome:
        self.asked.append((length, responses))
        return self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]


def test_cancel_that_came_too_late_is_tried_again():
    """A model that is done in milliseconds: all tokens say nothing about the cancel, the next try may."""
    engine = Engine(Outcome(0.01, 200), Outcome(0.0, 300), Outcome(0.1, 40))
    assert "40 of 300" in judge("cancelled", 300, engine)
    assert engine.asked == [(200, 3), (300, 1), (300, 1)]


def test_model_faster_than_a_cancel_is_a_skip_that_says_so():
    with pytest.raises(Skipped, match="faster than a cancel can be: all 46 tokens"):
        judge("cancelled", 46, Engine(Outcome(0.02, 46)))
    with pytest.raises(Skipped, match="faster"):
        judge("cancelled", 46, Engine(Outcome(0.0, 46, ended_before=True)))


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome(None, 150), "still runs in the engine after 2 s"),
        # As many tokens as asked for, long after the cancel, every time: it was ignored.
        (Outcome(1.2, 200), "all 200 tokens were made"),
        (Outcome(0.0, 0), "no token"),
        (Outcome(0.0, 2, ended_before=True), "ended by itself"),
    ],
)
def test_cancel_that_is_ignored_fails(outcome, text):
    with pytest.raises(CheckFailed, match=text):
        judge("cancelled", 200, Engine(outcome))


def test_bls_that_answers_otherwise_is_found(tiny_server, tiny_repository, monkeypatch):
    only(monkeypatch, "bls equals ensemble")
    ask = TritonClient.text
    monkeypatch.setattr(
        TritonClient, "text", lambda self, fields, *, model="ensemble": ask(self, fields, model=model) + model[15:]
    )
    (check,) = run(Endpoints(tiny_server.http_url, tiny_server.grpc_url), repository=tiny_repository).checks
    assert check.status == "fail"
    assert "the ensemble" in check.detail


def retype(config, tensor: str) -> None:
    """Declare an INT32 tensor as UINT32."""
    before = f'"{tensor}" data_type: TYPE_INT32'
    text = config.read_text()
    assert before in text
    config.write_text(text.replace(before, before.replace("INT32", "UINT32"), 1))


@pytest.fixture(params=[True, False], ids=["decoupled", "not decoupled"])
def echo_server(request, tmp_path, traces, plain_repository):
    repository = echo_repository.make(tmp_path / "repository", streaming=request.param)
    settings = ServerSettings(drain_seconds=2)
    with start(repository, log_path=tmp_path / "triton.log", settings=settings) as server:
        traces.prefixes.add(server.runtime.shm_prefix)
        yield server, repository, request.param


def test_what_a_poor_server_does_wrong_is_found(echo_server):
    """The echo knows no limits, no stop words and no sampling, and says so by its answers."""
    server, repository, streaming = echo_server
    checks = by_name(run(Endpoints(server.http_url, server.grpc_url), repository=repository, idle=10))
    passed = {"liveness", "metadata", "unary", "wrong type", "wrong shape", "max_tokens 1", "concurrent requests"}
    assert {name: checks[name].detail for name in passed if checks[name].status != "pass"} == {}
    for name in ("over-long prompt", "stop words", "seed"):
        assert checks[name].status == "fail", checks[name]
    # Decoupled: streams like any other. Not decoupled: takes stream=true without a word.
    assert checks["streaming"].status == ("pass" if streaming else "fail")


def test_empty_text_and_wrong_metadata_fail(tmp_path, traces, plain_repository, monkeypatch):
    # lpx's own launch would refuse it; the server of somebody else need not.
    monkeypatch.setattr("lpxbuild.server.launch._warm_up", lambda *_: None)
    repository = echo_repository.make(tmp_path / "repository")
    model = repository / "postprocessing" / "1" / "model.py"
    model.write_text(model.read_text().replace("bytes((tokens", "b'' and bytes((tokens"))
    with start(repository, log_path=tmp_path / "triton.log") as server:
        config = repository / "ensemble" / "config.pbtxt"
        retype(config, "max_tokens")
        checks = by_name(run(Endpoints(server.http_url, server.grpc_url), repository=repository, idle=10))
    assert checks["unary"].status == "fail"
    assert "is empty" in checks["unary"].detail
    assert checks["metadata"].status == "fail"
    assert "max_tokens" in checks["metadata"].detail
    assert "UINT32" in checks["metadata"].detail


def test_types_come_from_the_server(tmp_path, traces, plain_repository):
    """An older layout has max_tokens as UINT32; a client with types of its own would be refused."""
    repository = echo_repository.make(tmp_path / "repository")
    for name, tensor in (("ensemble", "max_tokens"), ("preprocessing", "REQUEST_OUTPUT_LEN")):
        config = repository / name / "config.pbtxt"
        retype(config, tensor)
    with start(repository, log_path=tmp_path / "triton.log") as server:
        checks = by_name(run(Endpoints(server.http_url, server.grpc_url), repository=repository, idle=10))
    assert checks["unary"].status == "pass", checks["unary"]
    assert checks["streaming"].status == "pass", checks["streaming"]


def test_nobody_listens():
    report = run(Endpoints("127.0.0.1:1", "127.0.0.1:1"), idle=5)
    assert not report.ok
    assert report.failed[0].name == "liveness"
    assert {check.status for check in report.checks[1:]} == {"skip"}


def test_server_that_accepts_and_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        held = []
        threading.Thread(target=lambda: held.append(silent.accept()), daemon=True).start()
        started = time.monotonic()
        report = run(Endpoints(f"127.0.0.1:{port}", f"127.0.0.1:{port}"), idle=1, deadline=4)
        assert time.monotonic() - started < 6
    assert report.failed[0].name == "liveness"


def test_silent_server_is_no_live_server_within_seconds(monkeypatch):
    """The longest silence between two tokens is no measure for a server that does not even say that it lives."""
    monkeypatch.setattr(service_checks, "LIVENESS_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        report = run(Endpoints(address, address), idle=60)
        assert time.monotonic() - started < 6
    assert report.failed[0].name == "liveness"
    assert "no answer" in report.failed[0].detail


def test_report_forms():
    report = SmokeReport(
        (
            Check("one", "pass", "fine", 0.5),
            Check("two", "fail", "bad \x00 <text>", 1.0),
            Check("three", "skip", "not here", 0.0),
            Check("four", "note", "so be it", 0.25),
        )
    )
    assert not report.ok
    assert report.summary() == "1 passed, 1 failed, 1 skipped, 1 note"
    assert report.as_dict()["checks"][0] == {"name": "one", "status": "pass", "detail": "fine", "seconds": 0.5}
    suite = ElementTree.fromstring(report.junit()).find("testsuite")
    counts = [suite.get(key) for key in ("tests", "failures", "skipped", "time")]
    assert counts == ["4", "1", "2", "1.750"]
    cases = {case.get("name"): case for case in suite}
    assert cases["two"].find("failure").get("message") == "bad \ufffd <text>"
    assert cases["three"].find("skipped") is not None
    # A note is not passed, and must not look so in JUnit.
    assert cases["four"].find("skipped").get("message") == "so be it"
    # Nothing passed: that is no evidence.
    assert not SmokeReport((Check("one", "skip", "", 0.0),)).ok
