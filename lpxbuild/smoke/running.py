"""Run all checks against a served repository, each within its time, and report."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lpxbuild.output import Output
from lpxbuild.smoke.client import RequestFailed, TritonClient
from lpxbuild.smoke.prompts import prompt_check
from lpxbuild.smoke.registry import CHECKS, CheckFailed, CheckFunction, Noted, Skipped, SmokePrompt, Subject
from lpxbuild.smoke.report import Check, SmokeReport, Status

# Modules whose functions register themselves, in the order in which they run.
CHECK_MODULES = ("service_checks", "generation_checks", "cancellation_checks")
DEFAULT_IDLE = 60.0
DEFAULT_DEADLINE = 180.0


@dataclass(frozen=True)
class Endpoints:
    """Where a server listens.

    Attributes:
        http_url, grpc_url: "host:port".
        engine_directory: folder of the engine host's socket; None looks for it when the server is on this host.
    """

    http_url: str
    grpc_url: str
    engine_directory: Path | None = None


def run(
    target: Endpoints,
    *,
    repository: Path | None = None,
    prompts: Sequence[SmokePrompt | Mapping[str, Any]] = (),
    idle: float = DEFAULT_IDLE,
    deadline: float = DEFAULT_DEADLINE,
    output: Output | None = None,
) -> SmokeReport:
    """Smoke-test a server.

    Args:
        repository: what is served, to compare its metadata and to know its limits.
        prompts: of the recipe, also as plain mappings; each one becomes a check of its own.
        idle: longest silence between two answers of one request, in seconds.
        deadline: longest time of one check, in seconds; a check beyond it has failed.

    Returns:
        A report; it never raises because of what the server does.
    """
    output = output or Output.quiet()
    limits = _limits(repository)
    subject = Subject(
        client=TritonClient(target.http_url, target.grpc_url, idle),
        repository=repository,
        engine_directory=target.engine_directory or _engine_directory(target.http_url),
        max_input_len=limits.get("max_input_len"),
        max_seq_len=limits.get("max_seq_len"),
    )
    for module in CHECK_MODULES:
        importlib.import_module(f"lpxbuild.smoke.{module}")
    plan: dict[str, CheckFunction] = dict(CHECKS)
    for number, entry in enumerate(prompts, start=1):
        prompt = entry if isinstance(entry, SmokePrompt) else SmokePrompt(**entry)
        plan[f"prompt {number}"] = partial(prompt_check, prompt=prompt)
    checks: list[Check] = []
    for name, function in plan.items():
        outcome = _run_one(name, function, subject, deadline)
        checks.append(outcome)
        output.step(f"smoke: {name}: {outcome.status}" + (f" ({outcome.detail})" if outcome.status == "fail" else ""))
        if name == "liveness" and outcome.status == "fail":
            # Without a server every other check would only repeat this one, after its full time.
            checks += [Check(rest, "skip", "no live server", 0.0) for rest in list(plan)[1:]]
            break
    return SmokeReport(tuple(checks))


def _run_one(name: str, function: CheckFunction, subject: Subject, deadline: float) -> Check:
    """In a thread, so that a check which hangs in a library can be left behind."""
    outcome: list[tuple[Status, str]] = []

    def call() -> None:
        try:
            outcome.append(("pass", function(subject)))
        except Skipped as skipped:
            outcome.append(("skip", str(skipped)))
        except Noted as noted:
            outcome.append(("note", str(noted)))
        except CheckFailed as failed:
            outcome.append(("fail", str(failed)))
        except RequestFailed as failed:
            outcome.append(("fail", f"{failed.status or 'error'}: {failed}"))
        except Exception as error:
            outcome.append(("fail", f"{type(error).__name__}: {error}"))

    started = time.monotonic()
    thread = threading.Thread(target=call, name=f"lpx-smoke-{name}", daemon=True)
    thread.start()
    thread.join(deadline)
    seconds = time.monotonic() - started
    status, detail = outcome[0] if outcome else ("fail", f"no end within {deadline:.0f} s")
    return Check(name, status, detail, seconds)


def _limits(repository: Path | None) -> dict[str, int]:
    """max_input_len and max_seq_len of the engine inside a repository; empty where there is none to read."""
    if repository is None:
        return {}
    try:
        text = (Path(repository) / "tensorrt_llm" / "1" / "engine" / "engine.json").read_text(encoding="utf-8")
        limits = json.loads(text)["limits"]
    except (OSError, ValueError, KeyError):
        return {}
    return {key: int(value) for key, value in limits.items() if isinstance(value, int)}


def _engine_directory(http_url: str) -> Path | None:
    """Where the engine host of a server on this host listens: in the environment of the process behind the port."""
    from lpxbuild.server import processes

    host, _, port = http_url.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit():
        return None
    pid = processes.listener(int(port))
    folder = processes.environment(pid).get("LPX_ENGINE_DIR") if pid is not None else None
    return Path(folder) if folder else None
