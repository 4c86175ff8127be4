"""How much memory this host has left, under every limit that can end the process."""

from __future__ import annotations

import os
from pathlib import Path


def gigabytes(count: int) -> str:
    """Bytes for people: `1.50 GB`, `12.0 MB`."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def available_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process can still take: the least of MemAvailable and of the room in its control groups.

    Page cache is counted as free, because the kernel gives it back.
    """
    limits = [_meminfo(proc / "meminfo")]
    for folder, limit_name, usage_name in _groups(proc, cgroup):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and usage is not None:
            limits.append(max(0, limit - usage + _page_cache(folder / "memory.stat")))
    return min(limits)


def _meminfo(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(proc: Path, cgroup: Path) -> list[tuple[Path, str, str]]:
    """Folders of this process' memory groups from the innermost out, for version 2 and version 1."""
    found = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            found.append((folder, *names))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return found


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _page_cache(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(fields.get(name, 0)) for name in ("active_file", "inactive_file"))
