"""Errors that a user can act on: *what* happened, *why*, and the *next* command or edit.

Every class carries the exit status of its kind; `lpxbuild.cli` is the only place that prints them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class LpxError(Exception):
    """Base of all expected failures.

    Args:
        what: one sentence naming what was found (file, key, value).
        why: what was expected, or the cause.
        next: the command to run or the edit to make.
        details: what a program wants to know beside the text; only in the JSON form.
    """

    exit_code = 70

    def __init__(self, what: str, *, why: str = "", next: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next
        self.details = details

    def __str__(self) -> str:
        return "\n".join(part for part in (self.what, self.why, self.next) if part)

    def as_dict(self) -> dict[str, Any]:
        """The form printed by `--json`."""
        document: dict[str, Any] = {
            "error": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "next": self.next,
            "exit_code": self.exit_code,
        }
        return document if self.details is None else {**document, "details": dict(self.details)}


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


_RAN_OUT = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
)
"""errno of what a host has too little of."""

_UNUSABLE = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
"""errno of a path that this user cannot use, whoever touches it first."""


def of_the_system(error: BaseException) -> LpxError | None:
    """What the operating system refused, as the user's error; None for anything that may be a bug of lpx."""
    if isinstance(error, MemoryError):
        return HostError(
            "memory ran out",
            why="this process may not have more (free memory, ulimit -v, the container's limit)",
            next="close other programs or raise the limit, then run the same command again",
        )
    if not isinstance(error, OSError):
        return None
    reason = os.strerror(error.errno or 0)
    what = f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, (str, bytes)) else reason
    if error.errno in _RAN_OUT:
        limit = {errno.EMFILE: "ulimit -n", errno.EAGAIN: "ulimit -u"}.get(error.errno)
        return HostError(
            what,
            why="this host, or a limit of this process, refused it" + (f" ({limit})" if limit else ""),
            next="make room or raise the limit, then run the same command again",
        )
    if error.errno in _UNUSABLE and error.filename is not None:
        return UsageError(what, why="lpx has to use this path", next="give another path, or change its permissions")
    return None


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
