"""Runs the children of verify: owned, logged, ended with lpx."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, LpxError, SourceError, ToolError

MODEL_REFUSED, HOST_LACKS = 2, 3
"""Exit statuses of the reference child with a meaning."""


def run(command: Sequence[str], job: Mapping[str, Any], folder: Path, log: Path, what: str) -> dict[str, Any]:
    """Write `job.json`, run the command with it, and read what it left in `result.json`.

    Args:
        folder: an empty folder: the job's output and the child's TMPDIR.
        what: names the child in a failure.

    Raises:
        SourceError: the model is none that the child can run.
        HostError: memory ran out.
        ToolError: it failed; names its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(json.dumps({"parent": os.getpid(), "out": str(folder.absolute()), **job}), encoding="utf-8")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # the model lies on disk; nothing is to be fetched for it
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TMPDIR": str(folder.absolute()),
    }
    with log.open("ab") as errors:
        begin = errors.tell()
        child = subprocess.Popen(
            [*command, str(file)],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            env=environment,
        )
        try:
            status = child.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
    if status != 0:
        raise _failed(status, log, begin, what)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def _failed(status: int, log: Path, begin: int, what: str) -> LpxError:
    text = log.read_bytes()[begin:].decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    log_text = f"the whole output is in {log}"
    if status == MODEL_REFUSED:
        return SourceError(last, why=log_text, next="set verify.run: never, or use a source that transformers can load")
    if status == HOST_LACKS or status == -signal.SIGKILL:
        return HostError(
            f"{what} ran out of memory",
            why=log_text,
            next="close other programs or raise the limit, then run the same command again",
        )
    return ToolError(f"{what} ended with status {status}: {last}", why=log_text, next=f"less {log}")
