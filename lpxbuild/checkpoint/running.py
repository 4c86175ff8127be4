"""How a conversion runs: its threads, what the host has room for, and errors of writing as the user meets them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import TypeVar

from lpxbuild.checkpoint.resources import check_disk, fitting_workers
from lpxbuild.checkpoint.statistics import Extent
from lpxbuild.checkpoint.transfer import Stopped
from lpxbuild.errors import HostError
from lpxbuild.memory import gigabytes
from lpxbuild.output import Output

T = TypeVar("T")

MOST_WORKERS = 4
"""More threads than this wait for memory bandwidth or the disk."""


def usual_workers() -> int:
    """One for each CPU of this process, up to the most that help."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def plan_workers(
    destination: Path,
    total: int,
    workers: int,
    *,
    memory_each: int,
    largest_mapping: int,
    files: str = "",
    output: Output,
) -> int:
    """Say what is going to happen, and how many workers the host has room for.

    Args:
        total: bytes that will be written.
        memory_each, largest_mapping: as `fitting_workers` takes them.
        files: what the plan says of the files (" into 2 rank file(s)").

    Raises:
        HostError: not even one fits, or the disk is too small.
    """
    fit, needed, available = fitting_workers(workers, memory_each=memory_each, largest_mapping=largest_mapping)
    if fit == 0:
        raise HostError(
            f"the conversion needs {gigabytes(needed)} of memory, {gigabytes(available)} are available",
            why="the limit is the least of free memory, the control group's and `ulimit -v`",
            next="free memory or raise the limit, and build again",
        )
    if fit < workers:
        output.notice(
            f"checkpoint: {fit} of {workers} workers: {gigabytes(available)} of memory are available, "
            f"each worker needs {gigabytes(needed // fit)}"
        )
    output.step(
        f"checkpoint: plan: {gigabytes(total)}{files}, {fit} worker(s), "
        f"memory needed {gigabytes(needed)}, available {gigabytes(available)}"
    )
    check_disk(destination, total)
    return fit


def run(tensors: Sequence[T], work: Callable[[T], None], workers: int, stop: Event) -> None:
    """Do all work with `workers` threads; the first error, or Ctrl-C, stops the others between two blocks."""
    if workers == 1:
        for tensor in tensors:
            work(tensor)
        return
    lock = Lock()
    remaining: Iterator[T] = iter(tensors)
    errors: list[BaseException] = []

    def loop() -> None:
        try:
            while not stop.is_set():
                with lock:
                    tensor = next(remaining, None)
                if tensor is None:
                    return
                work(tensor)
        except Stopped:
            return
        except BaseException as error:
            errors.append(error)
            stop.set()

    threads = [Thread(target=loop, name=f"convert-{number}") for number in range(workers)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]


def notice_non_finite(extents: Mapping[str, Extent], output: Output) -> None:
    broken = {name: extent.non_finite for name, extent in extents.items() if extent.non_finite}
    if broken:
        first = next(iter(broken))
        more = f" and {len(broken) - 1} more tensor(s)" if len(broken) > 1 else ""
        output.notice(
            f"checkpoint: the source has {sum(broken.values())} weight(s) that are NaN or infinite, in {first}{more}; "
            "answers will be wrong: get the model's files again"
        )


def guarded(path: Path, action: Callable[[], T]) -> T:
    try:
        return action()
    except OSError as error:
        raise host_error(path, error) from error


_REASONS = {
    errno.ENOSPC: ("no space is left on the device", "free space there, or set LPX_CACHE to a larger disk"),
    errno.EDQUOT: ("the disk quota is used up", "free space there, or set LPX_CACHE to another disk"),
    errno.EFBIG: (
        "the file is too large: a limit of this process (ulimit -f) or of the file system",
        "raise the limit, or set LPX_CACHE to another file system",
    ),
}


def host_error(path: Path, error: OSError) -> HostError:
    reason, remedy = _REASONS.get(error.errno or 0, (f"{error.strerror or error}", "check the folder and its disk"))
    return HostError(f"{path} could not be written", why=reason, next=remedy)
