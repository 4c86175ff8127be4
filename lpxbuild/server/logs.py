"""Reading the server's log: the lines that say why, without the noise of a host that has no GPU."""

from __future__ import annotations

import re
from pathlib import Path

# Written by every start on a CPU host, as warnings and errors, and harmless.
NOISE = re.compile(
    r"pinned (memory|system memory)|CudaDriverHelper has not been initialized|unable to create stream for ensemble"
    r"|Unable to create stream|DCGM|NVML|CUDA memory pool|no CUDA-capable device|CUDA driver version",
    re.IGNORECASE,
)
_USEFUL = re.compile(r"^E\d{4} |error|exception|traceback|segmentation|signal|failed|fatal|not healthy", re.IGNORECASE)
# A row of the table that Triton prints after loading, or a rule of it.
_TABLE = re.compile(r"^[|+]")


def size(path: Path) -> int:
    """Bytes written so far; 0 where there is no file yet."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, position: int) -> str:
    """Text written after byte `position`."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def whole_lines_from(path: Path, position: int) -> tuple[str, int]:
    """Finished lines after byte `position`, and the position of the first unfinished one."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return "", position
    data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace"), position + len(data)


def last_useful_lines(path: Path, *, position: int = 0, count: int = 6) -> list[str]:
    """The last lines that name a cause; where none does, simply the last lines."""
    lines = [line.strip() for line in read_from(path, position).splitlines()]
    lines = [line for line in lines if line and not NOISE.search(line) and not _TABLE.match(line)]
    useful = [line for line in lines if _USEFUL.search(line)]
    return (useful or lines)[-count:]
