"""Processes and shared memory, read from /proc: who is alive, who belongs to us, who holds a port or a segment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class ProcessState:
    """One line of /proc/PID/stat: `state` is the kernel's letter (R, S, D, Z …), `start` ticks since boot."""

    pid: int
    state: str
    parent: int
    group: int
    start: int


def state(pid: int) -> ProcessState | None:
    """State of a process, or None where it does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may hold anything: parentheses, and the first half of a letter that was cut.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessState(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def alive(pid: int, start: int | None = None) -> bool:
    """Whether `pid` runs (a zombie does not); `start` guards against a pid used again by another process."""
    found = state(pid)
    return found is not None and found.state not in "ZX" and (start is None or found.start == start)


def _folders() -> list[Path]:
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def all_states() -> list[ProcessState]:
    """Every process of the host that can be read."""
    return [found for folder in _folders() if (found := state(int(folder.name))) is not None]


def command_line(pid: int) -> list[str]:
    """Arguments of a process; empty where it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def in_group(group: int) -> list[int]:
    """Live members of a process group."""
    return [found.pid for found in all_states() if found.group == group and found.state not in "ZX"]


def marked(variable: str, value: str) -> list[int]:
    """Live processes whose environment has `variable=value`: ours, wherever they were re-parented or grouped."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in _folders():
        pid = int(folder.name)
        if pid != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0") and alive(pid):
                    found.append(pid)
    return found


def kill(pids: Iterable[int], patience: float = 5.0) -> None:
    """SIGKILL and wait until they are gone (or `patience` seconds passed: a process in uninterruptible sleep)."""
    waiting = list(pids)
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while any(alive(pid) for pid in waiting) and time.monotonic() < deadline:
        time.sleep(0.02)


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def remove_shared_memory(prefix: str) -> list[str]:
    """Delete our segments of /dev/shm (name starts with `prefix`) that no process has open or mapped.

    Returns:
        Names of the segments that are still in use and were left.
    """
    ours = [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefix)] if SHARED_MEMORY.is_dir() else []
    if not ours:
        return []
    used = _mapped_paths()
    for path in ours:
        if str(path) not in used:
            path.unlink(missing_ok=True)
    return sorted(path.name for path in ours if str(path) in used)


def _mapped_paths() -> set[str]:
    used = set()
    for folder in _folders():
        with contextlib.suppress(OSError):
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                if str(SHARED_MEMORY) in line:
                    used.add(line[line.index("/") :].removesuffix(" (deleted)"))
    return used


def listener(port: int) -> int | None:
    """Process id of the listener of a TCP port; None where there is none, or where it is another user's."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                listening = fields[3] == "0A"
                if listening and int(fields[1].rsplit(":", 1)[1], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in _folders() if inodes else ():
        with contextlib.suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                if str(descriptor.readlink()) in inodes:
                    return int(folder.name)
    return None


def port_holder(port: int) -> str:
    """ "pid 123 (nginx)" for the listener of a TCP port, "" where it cannot be seen."""
    pid = listener(port)
    if pid is None:
        return ""
    try:
        return f"pid {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
    except OSError:
        return f"pid {pid}"


def environment(pid: int) -> dict[str, str]:
    """Environment that a process was started with; empty where it cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
