"""`python -m lpxbuild` and the `lpx` script."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    _standard_streams()
    try:
        from lpxbuild.cli import app

        app()
    except KeyboardInterrupt:  # before a command runs; from then on `lpxbuild.cli.running` says what was stopped
        sys.stderr.write("error: stopped by SIGINT\n")
        sys.exit(130)


def _standard_streams() -> None:
    """Three open streams that take any text.

    A closed one (`lpx … >&-`) goes nowhere: otherwise the next file that is opened would get its number, and what a
    child process prints would land in that file. A name with bytes of no encoding is printed escaped.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  open to the end
        elif stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
