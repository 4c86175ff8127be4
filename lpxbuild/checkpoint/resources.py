"""What this host has left for a conversion: memory under every limit that can end the process, disk."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from lpxbuild.errors import HostError

MIB = 1 << 20
ADDRESS_SPACE_PER_WORKER = 160 * MIB
"""What a thread reserves without using it: its stack, and an arena of the allocator (64 MiB, aligned to as much)."""


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


def available_address_space() -> int | None:
    """Bytes left under `ulimit -v`, or None where it is not set."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return max(0, limit - used)


def fitting_workers(workers: int, *, memory_each: int, largest_mapping: int) -> tuple[int, int, int]:
    """How many of the wanted workers fit, and the two numbers behind it.

    Args:
        workers: wanted.
        memory_each: anonymous bytes one worker needs.
        largest_mapping: bytes of the source that one worker maps at once; counts under `ulimit -v` only.

    Returns:
        (workers, needed bytes, available bytes); workers is 0 where not even one fits.
    """
    memory = available_memory()
    address_space = available_address_space()
    fit = min(workers, memory // memory_each)
    needed, available = max(fit, 1) * memory_each, memory
    if address_space is not None:
        each = memory_each + largest_mapping
        by_limit = 0 if address_space < each else 1 + (address_space - each) // (each + ADDRESS_SPACE_PER_WORKER)
        if by_limit <= fit:
            fit = by_limit
            needed = each + (max(fit, 1) - 1) * (each + ADDRESS_SPACE_PER_WORKER)
            available = address_space
    return fit, needed, available


def check_disk(folder: Path, needed: int) -> None:
    """Refuse a conversion that would not fit.

    Raises:
        HostError: names the folder, the bytes needed and the bytes free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise HostError(
            f"{folder} has {gigabytes(free)} free, the checkpoint needs {gigabytes(needed)}",
            why="no space would be left on the device halfway through",
            next="free space there, or set LPX_CACHE to a folder on a larger disk",
        )
