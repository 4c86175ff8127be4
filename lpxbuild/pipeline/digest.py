"""SHA-256 of files, and the file times that tell when it has to be taken again.

A file counts as unchanged while its size, mtime, ctime and inode are those of the moment it was hashed. The ctime
cannot be set from user space, so a flipped byte with a restored mtime still shows. Every difference leads to a full
hash, never to a verdict by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lpxbuild.output import Advance, Output

BLOCK = 1 << 20
"""Bytes read at a time while hashing."""

PARALLEL_BYTES = 64 << 20
"""From this sum on, files are hashed by two threads (hashlib lets go of the interpreter lock)."""

BAR_BYTES = 32 << 20
"""From this sum on a progress bar is shown."""

SETTLED_NS = 50_000_000
"""A file younger than this (ns) may change again within one tick of the file system's clock: not remembered."""


def nothing(_bytes: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class FileRecord:
    """One file at the moment it was hashed; times in nanoseconds, size in bytes."""

    sha256: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, sha256: str, status: os.stat_result) -> FileRecord:
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FileRecord:
        """Raises KeyError, TypeError or ValueError on anything that is not a record."""
        record = cls(str(data["sha256"]), *(int(data[key]) for key in ("size", "mtime_ns", "ctime_ns", "inode")))
        if len(record.sha256) != 64:
            raise ValueError(f"not a SHA-256: {record.sha256!r}")
        return record

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def unchanged(self, status: os.stat_result) -> bool:
        """Whether `status` is the one the file had when it was hashed."""
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_size == self.size
            and status.st_mtime_ns == self.mtime_ns
            and status.st_ctime_ns == self.ctime_ns
            and status.st_ino == self.inode
        )


def with_current_times(folder: Path, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
    """The records after lpx itself made or removed links of the files, which moves their ctime.

    Only a file whose size, mtime and inode stayed is taken over; any other keeps its record, and the next check
    hashes it.
    """
    fresh = dict(files)
    for name, record in files.items():
        try:
            status = (folder / name).lstat()
        except OSError:
            continue
        now = FileRecord.of(record.sha256, status)
        if replace(now, ctime_ns=record.ctime_ns) == record:
            fresh[name] = now
    return fresh


def sha256_file(path: Path, advance: Advance = nothing) -> str:
    """Hex SHA-256 of a file's bytes; `advance` is told how many were read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            advance(count)
    return digest.hexdigest()


def record_file(path: Path, advance: Advance = nothing) -> FileRecord:
    """Hash a file; the recorded times are from before the read, so that a write meanwhile shows later."""
    status = path.stat()
    return FileRecord.of(sha256_file(path, advance), status)


def record_files(paths: Iterable[Path], advance: Advance = nothing) -> list[FileRecord]:
    """Hash several files, large ones two at a time; order is kept."""
    paths = list(paths)
    if len(paths) > 1 and sum(path.stat().st_size for path in paths) > PARALLEL_BYTES:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda path: record_file(path, advance), paths))
    return [record_file(path, advance) for path in paths]


def bar(output: Output | None, label: str, total: int) -> AbstractContextManager[Advance]:
    """A progress bar for work on so many bytes; none where it is over before it could be read."""
    return output.progress(label, total) if output is not None and total >= BAR_BYTES else nullcontext(nothing)


def tree(folder: Path) -> list[str]:
    """Sorted relative names of everything in a folder that is not a folder itself.

    `__pycache__` is left out: a Python model that is served writes there, and Python checks it against its source.
    """
    names: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        base = Path(root)
        links = [name for name in folders if (base / name).is_symlink()]
        names += [(base / name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(names)


def combined(files: Mapping[str, str]) -> str:
    """One digest for a set of files: SHA-256 over sorted lines `sha256  name`."""
    lines = "".join(f"{files[name]}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


class RememberedDigests:
    """Digests of files outside the cache (sources), one JSON file per folder, checked by `FileRecord.unchanged`."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def digests(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        known: Mapping[str, str] | None = None,
        fresh: bool = False,
        save: bool = True,
        before_reading: Callable[[], None] | None = None,
        output: Output | None = None,
    ) -> dict[str, str]:
        """SHA-256 per name.

        Args:
            folder: where the files are.
            names: relative names.
            known: digests that came with the files (the hub's own metadata): taken unless `fresh`.
            fresh: read every file again, whatever is remembered.
            save: remember what was found.
            before_reading: called once if any file has to be read: the moment for cheaper questions.
            output: shows the progress.

        Raises:
            OSError: a file cannot be read.
        """
        place = self.store / f"{hashlib.sha256(str(folder).encode()).hexdigest()[:32]}.json"
        stored = _load(place)
        remembered = {} if fresh else stored
        found: dict[str, FileRecord] = {}
        to_hash: list[str] = []
        for name in names:
            status = (folder / name).stat()
            record = remembered.get(name)
            if record is not None and record.unchanged(status):
                found[name] = record
            elif known is not None and name in known and not fresh and record is None:
                found[name] = FileRecord.of(known[name], status)
            else:
                to_hash.append(name)
        if to_hash and before_reading is not None:
            before_reading()
        paths = [folder / name for name in to_hash]
        with bar(output, f"hash {folder.name}", sum(path.stat().st_size for path in paths)) as advance:
            found.update(zip(to_hash, record_files(paths, advance)))
        # What another source in the same folder (several .gguf files) needs stays.
        together = {**stored, **found}
        if save and together != stored:
            self._save(place, folder, together)
        return {name: record.sha256 for name, record in found.items()}

    def _save(self, place: Path, folder: Path, found: Mapping[str, FileRecord]) -> None:
        from lpxbuild.pipeline.placing import write_atomically

        limit = time.time_ns() - SETTLED_NS
        settled = {name: r.as_dict() for name, r in found.items() if max(r.mtime_ns, r.ctime_ns) < limit}
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps({"folder": str(folder), "files": settled}), durable=False)


def _load(place: Path) -> dict[str, FileRecord]:
    """What is remembered; a file that cannot be read or parsed only costs a new hash."""
    try:
        files = json.loads(place.read_text(encoding="utf-8"))["files"]
        return {name: FileRecord.from_dict(data) for name, data in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
