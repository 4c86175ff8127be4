"""What this host has left for a conversion: memory under every limit that can end the process, disk."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from lpxbuild.errors import HostError
from lpxbuild.memory import available_memory, gigabytes

MIB = 1 << 20
ADDRESS_SPACE_PER_WORKER = 160 * MIB
"""What a thread reserves without using it: its stack, and an arena of the allocator (64 MiB, aligned to as much)."""


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
