"""How every command runs: one output object, one error map, one way to stop."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lpxbuild.errors import LpxError, UsageError, of_the_system
from lpxbuild.output import Mode, Output


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like KeyboardInterrupt so that every stage cleans up."""


def _on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated


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
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield output
    except LpxError as error:
        if os.environ.get("LPX_DEBUG") == "1":
            raise
        output.error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _stopped(output, "SIGINT")
        sys.exit(130)
    except Terminated:
        _stopped(output, "SIGTERM")
        sys.exit(143)
    except Exception as error:
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


def _stopped(output: Output, name: str) -> None:
    output.error(
        LpxError(
            f"stopped by {name}",
            why="finished stages are kept in the cache, the unfinished one was removed",
            next="run the same command again to go on from there",
        )
    )
