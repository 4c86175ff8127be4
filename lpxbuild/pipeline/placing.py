"""Putting files and folders in their place so that a crash at any moment leaves the old or the new, never a half."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from lpxbuild.errors import HostError, LpxError
from lpxbuild.output import Advance
from lpxbuild.pipeline.digest import BLOCK, nothing, tree

LARGE = 1_000_000
"""From this size (bytes) on a file is shared with the cache and read-only; smaller ones are copied."""

TEMPORARY = ".tmp-"
"""Beginning of the names of things that are not finished."""

_FICLONE = 0x40049409  # linux/fs.h: share the blocks of another file, copy on write
_RENAME_EXCHANGE = 2  # linux/fs.h: swap two names in one step
_AT_FDCWD = -100

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno of a write that found no room."""

REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
"""errno of a write that this user or this place does not allow, or that something of another kind is in the way of."""


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write beside the target, flush to the disk, rename; durable False leaves the flushing to the system."""
    sweep_files(path.parent, f"{TEMPORARY}{glob.escape(path.name)}-*")
    temporary, file = _own_file(path)
    try:
        with file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def _own_file(path: Path) -> tuple[Path, TextIO]:
    """A new temporary file beside `path`, locked for as long as it is open: that tells it from a dead process's."""
    while True:
        temporary = path.parent / f"{TEMPORARY}{path.name}-{uuid.uuid4().hex[:12]}"
        file = temporary.open("w", encoding="utf-8")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()  # swept between its making and its lock


def sweep_files(folder: Path, pattern: str) -> int:
    """Remove temporary files that no living process is writing; returns how many."""
    swept = 0
    for path in folder.glob(pattern):
        # An OSError: gone meanwhile, a folder, or being written.
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            swept += 1
    return swept


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Flush every file and every folder below, so that a name seen after a power cut has its bytes."""
    for root, _folders, files in os.walk(folder):
        for name in files:
            if not (Path(root) / name).is_symlink():
                sync_folder(Path(root) / name)
        sync_folder(Path(root))


def exchange(new: Path, target: Path) -> Path | None:
    """Put folder `new` at `target`; what was there is at the returned path afterwards (None: nothing was).

    Uses one renameat2(RENAME_EXCHANGE) where the file system has it, otherwise two renames.
    """
    if not target.exists() and not target.is_symlink():
        new.rename(target)
        return None
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        done = libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE)
        if done == 0:
            return new
    aside = target.parent / f"{TEMPORARY}old-{target.name}-{uuid.uuid4().hex[:12]}"
    target.rename(aside)
    new.rename(target)
    return aside


def place_file(original: Path, target: Path, advance: Advance = nothing) -> str:
    """Bring one file of the cache to `target`.

    Large files become reflinks or read-only hard links, and copies where the file system has neither; small ones
    are copies. `advance` is told the bytes that are in place.

    Returns:
        SHA-256 of what a copy wrote, or "" for a link, which has the original's bytes by construction.
    """
    if original.stat().st_size >= LARGE:
        if _reflink(original, target):
            target.chmod(0o444)
            advance(original.stat().st_size)
            return ""
        try:
            os.link(original, target)
            advance(original.stat().st_size)
            return ""
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
    digest = hashlib.sha256()
    with original.open("rb") as source, target.open("xb") as copy:
        while block := source.read(BLOCK):
            digest.update(block)
            copy.write(block)
            advance(len(block))
    mode = stat.S_IMODE(original.stat().st_mode)
    target.chmod(mode if target.stat().st_size >= LARGE else mode | stat.S_IWUSR)
    return digest.hexdigest()


def _reflink(original: Path, target: Path) -> bool:
    with original.open("rb") as source, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
            return True
        except OSError:
            pass
    target.unlink()
    return False


def remove_tree(folder: Path) -> None:
    """Remove a folder, its read-only files and folders too; one that is gone already is fine."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
        return
    for root, folders, _files in os.walk(folder):
        for name in folders:
            path = Path(root) / name
            if not path.is_symlink() and not os.access(path, os.W_OK):
                path.chmod(0o755)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def make_large_files_read_only(folder: Path) -> None:
    """Files of 1 MB and more are shared by links: a stray write through one name would reach all of them."""
    for name in tree(folder):
        path = folder / name
        if not path.is_symlink() and path.stat().st_size >= LARGE:
            path.chmod(0o444)


def free_bytes(folder: Path) -> int:
    """Bytes a user may still write where `folder` is, or will be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def room_errors(folder: Path) -> Iterator[None]:
    """Turn "no space left", "file too large" and "read-only" of any write inside into a HostError."""
    try:
        yield
    except LpxError:
        raise
    except OSError as error:
        path = error.filename2 or error.filename or folder
        if error.errno in FULL:
            free = free_bytes(folder)
            raise HostError(
                f"{path}: {os.strerror(error.errno or 0)}",
                why=f"writing below {folder} failed; {free:,} bytes are free there"
                + (" and files are limited in size (ulimit -f)" if error.errno == errno.EFBIG else ""),
                next="make room (lpx cache prune --dry-run shows what could go) or set LPX_CACHE to another disk; "
                "nothing half-made was left, and the same command goes on from the last finished stage",
            ) from error
        place = Path(os.fsdecode(path)).absolute()
        above = error.errno in (*REFUSED, errno.ENOENT) and folder.absolute().is_relative_to(place)
        if above or (error.errno in REFUSED and place.is_relative_to(folder.absolute())):
            raise HostError(
                f"{path}: {os.strerror(error.errno or 0)}",
                why=f"lpx has to write below {folder}",
                next="remove what is in the way, or set LPX_CACHE / --build-dir to another folder"
                if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)
                else "change its permissions, or set LPX_CACHE / --build-dir to a folder you own",
            ) from error
        raise
