"""Safetensors headers, read and checked without touching the weights.

Format (github.com/huggingface/safetensors, README): u64 LE length N, N bytes of JSON
`{name: {dtype, shape, data_offsets: [begin, end]}}`, then the data without holes up to the end of the file.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.source.records import TensorEntry

HEADER_LIMIT = 100_000_000  # the format's own limit on N
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
LFS_PREFIX = b"version https://git-lfs"


def read_header(path: Path, *, download: str) -> dict[str, TensorEntry]:
    """Entries of one safetensors file by tensor name.

    Args:
        path: the file.
        download: the command that fetches it again, shown in errors.

    Raises:
        SourceError: a Git LFS pointer, a file cut short, a header that breaks the format.
    """
    try:
        return _read(path, download)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", next=f"ls -l {path}") from None


def _read(path: Path, download: str) -> dict[str, TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if (prefix + file.read(len(LFS_PREFIX) - 8)).startswith(LFS_PREFIX):
            raise _lfs_pointer(path, size, download)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise _truncated(path, f"at least 8 bytes for the header's length, found {size} bytes", download)
        if length > HEADER_LIMIT:
            raise _broken(path, f"its header would be {length} bytes long, the format allows {HEADER_LIMIT}", download)
        if length > size - 8:
            raise _truncated(path, f"a header of {length} bytes, found {size - 8} bytes after its length", download)
        file.seek(8)
        text = file.read(length)
    return _entries(path, text, data_begin=8 + length, size=size, download=download)


def _entries(path: Path, text: bytes, *, data_begin: int, size: int, download: str) -> dict[str, TensorEntry]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON ({error})", download) from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is not a JSON object", download)
    entries: dict[str, TensorEntry] = {}
    for name, value in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (begin, end) = _fields(path, name, value, download)
        if end - begin != prod(shape) * DTYPE_BYTES[dtype]:
            wanted = prod(shape) * DTYPE_BYTES[dtype]
            reason = f"tensor {name} ({dtype} {list(shape)}) needs {wanted} bytes, its offsets give {end - begin}"
            raise _broken(path, reason, download)
        entries[name] = TensorEntry(path, dtype, shape, data_begin + begin, data_begin + end)
    _check_layout(path, entries, data_begin=data_begin, size=size, download=download)
    return entries


def _check_layout(path: Path, entries: dict[str, TensorEntry], *, data_begin: int, size: int, download: str) -> None:
    position = data_begin
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            reason = f"tensor {name} begins at byte {entry.begin}, the one before it ends at {position}"
            raise _broken(path, reason, download)
        position = entry.end
    if position > size:
        cut = min((e.begin, n) for n, e in entries.items() if e.end > size)[1]
        raise _truncated(path, f"{position} bytes, found {size} (first cut tensor: {cut})", download)
    if position < size:
        raise _broken(
            path, f"{size - position} bytes follow the last tensor: expected {position}, found {size}", download
        )


def _fields(path: Path, name: str, value: Any, download: str) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _broken(path, f"the entry of tensor {name} lacks dtype, shape or data_offsets", download) from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken(path, f"tensor {name} has the unknown dtype {dtype!r}", download)
    if any(type(n) is not int or n < 0 for n in (*shape, begin, end)):
        raise _broken(path, f"tensor {name} has a size or an offset that is not a whole number", download)
    return dtype, shape, (begin, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _lfs_pointer(path: Path, size: int, download: str) -> SourceError:
    expected = ""
    for line in path.read_text(errors="replace").splitlines()[:5]:
        if line.startswith("size "):
            expected = f"; the real file has {line[5:].strip()} bytes"
    return SourceError(
        f"{path.name} is a Git LFS pointer of {size} bytes, not the weights{expected}",
        why="the repository was cloned without Git LFS",
        next=f"{download}   (or run `git lfs pull` in {path.parent})",
    )


def _truncated(path: Path, expected: str, download: str) -> SourceError:
    return SourceError(
        f"{path.name} is truncated: expected {expected}",
        why="the download or copy of this file is incomplete",
        next=download,
    )


def _broken(path: Path, reason: str, download: str) -> SourceError:
    return SourceError(f"{path.name} is not a valid safetensors file: {reason}", why=str(path), next=download)
