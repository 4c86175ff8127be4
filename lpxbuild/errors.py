"""Errors that a user can act on: *what* happened, *why*, and the *next* command or edit.

Every class carries the exit status of its kind; `lpxbuild.cli` is the only place that prints them.
"""

from __future__ import annotations

from dataclasses import dataclass


class LpxError(Exception):
    """Base of all expected failures.

    Args:
        what: one sentence naming what was found (file, key, value).
        why: what was expected, or the cause.
        next: the command to run or the edit to make.
    """

    exit_code = 70

    def __init__(self, what: str, *, why: str = "", next: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.next) if part)

    def as_dict(self) -> dict[str, str | int]:
        """The form printed by `--json`."""
        return {
            "error": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "next": self.next,
            "exit_code": self.exit_code,
        }


class VerdictError(LpxError):
    """A check, proof or plan ended negative."""

    exit_code = 1


class UsageError(LpxError):
    """Wrong command line or wrong call."""

    exit_code = 2


class RecipeError(UsageError):
    """The recipe is wrong; `what` names file, line, key."""


class SourceError(UsageError):
    """The model source is missing, gated, incomplete, inconsistent or not supported."""


class HostError(LpxError):
    """This host lacks something: GPU, disk, memory, port, shared memory, network, package."""

    exit_code = 3


class ToolError(LpxError):
    """An external program or library failed; `why` names its log."""

    exit_code = 4


@dataclass(frozen=True)
class ExitStatus:
    """One row of the table of exit codes (generated into the docs)."""

    code: int
    meaning: str


EXIT_STATUSES: tuple[ExitStatus, ...] = (
    ExitStatus(0, "done"),
    ExitStatus(1, "a check or proof is negative"),
    ExitStatus(2, "usage, recipe or source is wrong (also refusals, gated or missing repositories)"),
    ExitStatus(3, "this host lacks something (GPU, disk, memory, port, shared memory, network, package)"),
    ExitStatus(4, "an external tool failed"),
    ExitStatus(70, "a bug in lpx"),
    ExitStatus(130, "stopped by SIGINT"),
    ExitStatus(143, "stopped by SIGTERM"),
)
