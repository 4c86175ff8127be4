"""How every command runs: one output object, one error map, one way to stop."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from lpxbuild.errors import LpxError, UsageError, of_the_system
from lpxbuild.output import Mode, Output


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like KeyboardInterrupt so that every stage cleans up."""


STOPS = {"SIGINT": 130, "SIGTERM": 143}


def _on_signals() -> list[str]:
    """Handle SIGTERM and, unless it is ignored (`nohup`, `&` in a script), SIGINT; returns the list of what arrived.

    What a handler raises can end as something else: an extension module that is being imported turns it into an
    ImportError. The list tells such an error from a real one.
    """
    arrived: list[str] = []

    def terminate(_signal: int, _frame: FrameType | None) -> None:
        arrived.append("SIGTERM")
        raise Terminated

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        arrived.append("SIGINT")
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    return arrived


@contextmanager
def running(json: bool, quiet: bool) -> Iterator[Output]:
    """Run a command's body with an `Output`; ends the process with the exit status of what happened.

    Raises:
        SystemExit: with the statuses of `lpxbuild.errors.EXIT_STATUSES`.
    """
    mode: Mode = "json" if json else "quiet" if quiet else "human"
    output = Output(mode)
    if json and quiet:
        output.error(UsageError("--json and --quiet exclude each other", next="give one of them"))
        sys.exit(UsageError.exit_code)
    arrived = _on_signals()
    try:
        yield output
    except LpxError as error:
        if os.environ.get("LPX_DEBUG") == "1":
            raise
        output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _stopped(output, "SIGINT")
    except Terminated:
        _stopped(output, "SIGTERM")
    except Exception as error:
        if arrived:
            _stopped(output, arrived[0])
        if os.environ.get("LPX_DEBUG") == "1":
            raise
        if (refused := of_the_system(error)) is not None:
            output.error(refused)
            sys.exit(refused.exit_code)
        output.error(
            LpxError(
                f"a bug in lpx: {type(error).__name__}: {error}",
                why="this should not happen whatever the input",
                next="run again with LPX_DEBUG=1 and report the traceback",
            )
        )
        sys.exit(70)


def _stopped(output: Output, name: str) -> NoReturn:
    output.error(
        LpxError(
            f"stopped by {name}",
            why="what was finished is kept, what was not was removed",
            next="run the same command again to go on from there",
        )
    )
    sys.exit(STOPS[name])
