"""Putting files into the repository: small ones copied, large ones shared with the engine they come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lpxbuild.errors import UsageError
from lpxbuild.shipped import shipped

# From this size on, a file is shared by reflink or hard link instead of copied.
SHARED_SIZE = 1 << 20
_FICLONE = 0x40049409  # linux/fs.h


def model_files(model: str) -> tuple[Path, ...]:
    """The shipped files that lie in a model's version folder (model.py, its libraries and tables).

    `model_repo/contents.json` maps each model to paths relative to `model_repo`; they end up side by side.
    """
    root = shipped("model_repo")
    contents = json.loads((root / "contents.json").read_text(encoding="utf-8"))
    return tuple(root / name for name in contents.get(model, ()))


def copy_tree(source: Path, target: Path, *, without: frozenset[str] = frozenset()) -> int:
    """Copy a folder file by file; large files are shared.

    Args:
        without: names directly below `source` that stay behind.

    Returns:
        Bytes that were shared instead of copied.
    """
    shared = 0
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_dir() or relative.parts[0] in without:
            continue
        place = target / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        shared += _place(path.resolve(), place)
    return shared


def _place(source: Path, target: Path) -> int:
    size = source.stat().st_size
    if size < SHARED_SIZE:
        shutil.copyfile(source, target)
        return 0
    shared = size if _reflink(source, target) or _hard_link(source, target) else 0
    if not shared:
        shutil.copyfile(source, target)
    # With a hard link this protects the engine itself: writing to one would change the other.
    target.chmod(0o444)
    return shared


def _reflink(source: Path, target: Path) -> bool:
    """Share the blocks copy-on-write, where the file system can (btrfs, XFS)."""
    import fcntl

    try:
        with source.open("rb") as reader, target.open("wb") as writer:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def _hard_link(source: Path, target: Path) -> bool:
    try:
        target.hardlink_to(source)
    except OSError:
        return False
    return True


def read_engine(path: Path) -> dict[str, object]:
    """`engine.json` of an engine folder.

    Raises:
        UsageError: missing, or not a JSON object with `backend` and `limits`.
    """
    file = path / "engine.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} is not an engine: it has no engine.json", next="lpx build --to engine") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read", why=str(error), next="lpx build RECIPE   makes it anew") from error
    if not isinstance(data, dict) or not isinstance(data.get("limits"), dict) or "backend" not in data:
        raise UsageError(
            f"{file} has no backend and limits",
            why="it was written by another version of lpx, or is cut",
            next="lpx build RECIPE   makes it anew",
        )
    return data
