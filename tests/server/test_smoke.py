"""The smoke test: passes on what works, fails on what does not, and never hangs."""

from __future__ import annotations

import socket
import threading
import time
from xml.etree import ElementTree

import echo_repository
import pytest
import tiny_model

from lpxbuild.server import ServerSettings, start
from lpxbuild.smoke import Check, Endpoints, SmokePrompt, SmokeReport, run

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


def test_engine_that_cannot_be_asked_is_said(tiny_server, tmp_path):
    report = run(Endpoints(tiny_server.http_url, tiny_server.grpc_url, engine_directory=tmp_path), idle=20)
    check = by_name(report)["cancel a direct stream"]
    assert check.status == "skip"
    assert "not measurable" in check.detail


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


def test_empty_text_and_wrong_metadata_fail(tmp_path, traces, plain_repository):
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
    assert counts == ["4", "1", "1", "1.750"]
    cases = {case.get("name"): case for case in suite}
    assert cases["two"].find("failure").get("message") == "bad \ufffd <text>"
    assert cases["three"].find("skipped") is not None
    assert cases["four"].find("system-out").text == "so be it"
    # Nothing passed: that is no evidence.
    assert not SmokeReport((Check("one", "skip", "", 0.0),)).ok
