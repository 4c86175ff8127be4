"""The end of a tritonserver: SIGTERM, running requests finish, models unload; and how to tell that all that is over.

Triton 2.51 does not always get to its own end: a gRPC stream to the ensemble that its client cancelled stays "in
flight" for ever, and a model whose process was killed once is never unloaded. Waiting for either loses time and saves
nobody's request, so the log is read while the server drains.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from lpxbuild.server import logs

# Written when the last running request has finished and the unloading begins.
REQUESTS_FINISHED = "All models are stopped, unloading models"
# One report each second: how many models have requests, then their names.
_REPORT = re.compile(r"Timeout \d+: Found \d+ model versions that have in-flight inferences")
_UNLOADED = re.compile(r"successfully unloaded '(?P<model>[^']+)'")
_IN_FLIGHT = re.compile(r"Model '(?P<model>[^']+)' \(version \d+\) has \d+ in-flight inferences")
# One line each second while it waits for clients to close their connections, before it looks at the requests.
_CONNECTIONS = re.compile(r"Timeout \d+: Found [1-9]\d* HTTP service connections")
_CONNECTIONS_CLOSED = "Waiting for in-flight requests to complete"
# Unloading takes Triton about a second for each Python instance of a model; much longer on a host without a free core.
UNLOAD_SECONDS = 10.0
UNLOAD_SECONDS_PER_INSTANCE = 3.0
# From the last model's unloading to the end of the process: Triton looks once a second, then takes itself apart.
EXIT_SECONDS = 10.0
# The same two where a model was loaded again after a death: that unloading comes to no end.
REPAIRED_UNLOAD_SECONDS = 4.0
REPAIRED_EXIT_SECONDS = 1.5


def forsaken(log: str, ensembles: set[str]) -> bool:
    """Whether only ensembles have requests in flight and none of their steps, in the last two reports of the log.

    Between two steps a request is in no step for an instant; two reports are a second apart. The newest report may
    not be written to its end yet and is not counted.
    """
    reports = _REPORT.split(log)[1:-1]
    if len(reports) < 2:
        return False
    named = [{match["model"] for match in _IN_FLIGHT.finditer(report)} for report in reports[-2:]]
    return all(models and models <= ensembles for models in named)


def only_connections(log: str) -> bool:
    """Whether the server has waited for nothing but open HTTP connections for three reports, a second each."""
    return _CONNECTIONS_CLOSED not in log and len(_CONNECTIONS.findall(log)) >= 3


def drain(
    process: subprocess.Popen[bytes],
    log_path: Path,
    *,
    bound: float,
    unload: float,
    exit: float,
    repaired: bool,
    models: set[str],
    ensembles: set[str],
    engine_idle: Callable[[], bool],
) -> bool:
    """SIGTERM, and wait for the end of the process, or until nothing is left that is worth waiting for.

    Args:
        bound: longest wait, in seconds.
        unload: longest wait for the models' unloading after the last running request has finished.
        exit: longest wait for the end of the process after that.
        repaired: whether a model was loaded again after a death; Triton keeps the connections of its requests open.
        models: names of the models that have processes.
        ensembles: names of the ensembles.
        engine_idle: whether the engine has no running request.

    Returns:
        Whether all running requests had finished. The process may still be there.
    """
    position = logs.size(log_path)
    process.send_signal(signal.SIGTERM)
    deadline = last = time.monotonic() + bound
    stage = "requests"
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        log = logs.read_from(log_path, position)
        if stage == "requests" and REQUESTS_FINISHED in log:
            stage = "unloading"
            deadline = min(last, time.monotonic() + unload)
        elif stage == "requests" and (forsaken(log, ensembles) or (repaired and only_connections(log))):
            if engine_idle():
                return True
        elif stage == "unloading" and models <= {match["model"] for match in _UNLOADED.finditer(log)}:
            stage = "end"
            deadline = min(last, time.monotonic() + exit)
    return stage != "requests" or process.returncode == 0
