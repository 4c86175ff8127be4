"""The one output object: results to stdout, everything else to stderr; human, json or quiet.

Library code takes it as `output: Output`; `Output.quiet()` is the value for use from Python.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from lpxbuild.errors import HostError, LpxError

Mode = Literal["human", "json", "quiet"]
Advance = Callable[[int], None]


class Output:
    """Prints for one command run.

    Args:
        mode: `human` (text, progress bars on a terminal), `json` (one JSON document on stdout), `quiet` (results only).
    """

    def __init__(self, mode: Mode = "human", *, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self.mode = mode
        self.stdout = stdout if stdout is not None else sys.stdout
        self.stderr = stderr if stderr is not None else sys.stderr
        self.notices: list[str] = []
        self._answered = False

    @classmethod
    def quiet(cls) -> Output:
        """For library use: notices are kept in `.notices`, nothing is printed but results."""
        return cls("quiet")

    def step(self, text: str) -> None:
        """A line of progress ("checkpoint: 3 ranks written")."""
        if self.mode == "human":
            self._stderr_line(text, None)

    def notice(self, text: str) -> None:
        """Something the user should know and did not ask for; kept in `.notices`, shown in every mode but quiet."""
        self.notices.append(text)
        if self.mode != "quiet":
            self._stderr_line(f"notice: {text}", "yellow")

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """A bar with bytes, rate and ETA while the block runs; only in human mode on a terminal.

        Args:
            label: what is being done.
            total: bytes of the whole work, or None where it is unknown.
        """
        if self.mode != "human" or not self.stderr.isatty():
            yield lambda _bytes: None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(file=self.stderr), transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.advance(task, done)

    def result(self, data: Mapping[str, Any], human: str = "") -> None:
        """The answer of the command: `data` in json mode, `human` otherwise."""
        self._answered = True
        if self.mode == "json":
            self._print(self._document(data))
        elif human:
            self._print(human if human.endswith("\n") else human + "\n")

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        """Plain aligned columns, readable in a terminal, a log and a pull request."""
        widths = [max(len(str(row[i])) for row in (headers, *rows)) for i in range(len(headers))]
        lines = [
            "  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)).rstrip() for row in (headers, *rows)
        ]
        return "\n".join(lines)

    def error(self, error: LpxError) -> None:
        """The one formatter of failures: what, why, next on stderr; in json mode the document on stdout as well.

        After a `result` (a report that says itself what failed) stdout has its one document already.
        """
        if self.mode == "json" and not self._answered:
            # A stdout that takes no document must not hide the message on stderr.
            with contextlib.suppress(HostError):
                self._print(self._document(error.as_dict()))
        self._stderr_line(f"error: {error.what}", "red")
        for word, text in (("why", error.why), ("next", error.next)):
            if text:
                self._stderr_line(f"  {word}: {text}", None)

    def _stderr_line(self, text: str, colour: str | None) -> None:
        if colour is not None and self.stderr.isatty():
            code = {"yellow": "33", "red": "31"}[colour]
            text = f"\x1b[{code}m{text}\x1b[0m"
        # A stderr that nobody reads, or a full disk behind it, is no reason to stop the work or to hide how it ended.
        try:
            self.stderr.write(text + "\n")
            self.stderr.flush()
        except OSError:
            _discard(self.stderr)

    def _document(self, data: Mapping[str, Any]) -> str:
        """JSON that the encoding of stdout can carry: names of files may be any bytes."""
        import json

        text = json.dumps(data, indent=2, ensure_ascii=False, default=str) + "\n"
        try:
            text.encode(self.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = json.dumps(data, indent=2, default=str) + "\n"
        return text

    def _print(self, text: str) -> None:
        """Raises HostError when stdout takes no more; a reader that went away (`lpx recipes | head`) is fine."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError:
            _discard(self.stdout)
        except OSError as error:
            _discard(self.stdout)
            raise HostError(
                f"the result cannot be written to stdout: {os.strerror(error.errno or 0)}",
                why="the command ended, its answer is lost",
                next="make room where stdout goes, then run the same command again",
            ) from error


def _discard(stream: TextIO) -> None:
    """Let what is still buffered, and what comes later, go nowhere."""
    with contextlib.suppress(OSError, ValueError):
        handle = os.open(os.devnull, os.O_WRONLY)
        os.dup2(handle, stream.fileno())
        os.close(handle)
