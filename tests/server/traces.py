"""What servers leave behind, read from /proc and /dev/shm by other means than the code under test."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

TEST_MARK = "LPX_TEST_MARK"


def processes_with(variable: str, value: str) -> list[str]:
    """Command lines of all processes, zombies too, that have `variable=value` in their environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(folder.name + " " + (folder / "cmdline").read_bytes().decode().replace("\0", " "))
    return found


def zombie_children() -> list[int]:
    """Children of the test process that nobody has waited for."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if fields[0] == "Z" and int(fields[1]) == os.getpid():
                    found.append(int(folder.name))
    return found


def wait_until(condition, seconds: float, what: str):
    """The first true value of `condition()`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


class Shm:
    """Names of shared-memory segments seen under the prefixes of this test's servers."""

    def __init__(self) -> None:
        self.prefixes: set[str] = set()

    def left(self) -> list[str]:
        names = [path.name for path in Path("/dev/shm").iterdir()]
        return [name for name in names if any(name.startswith(prefix) for prefix in self.prefixes)]


@contextlib.contextmanager
def nothing_left() -> Iterator[Shm]:
    """Fails when the block leaves a process, a zombie or a segment of shared memory behind."""
    mark = secrets.token_hex(8)
    outer = os.environ.get(TEST_MARK)
    os.environ[TEST_MARK] = mark
    shm = Shm()
    try:
        yield shm
    finally:
        os.environ.pop(TEST_MARK)
        if outer is not None:
            os.environ[TEST_MARK] = outer
    deadline = time.monotonic() + 3
    while processes_with(TEST_MARK, mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(TEST_MARK, mark) == []
    assert shm.left() == []
    assert zombie_children() == []
