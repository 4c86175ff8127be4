"""The content-addressed cache: `$LPX_CACHE/STAGE/KEY/{artifact.json,files/…}`.

A folder under its final name is complete. One lock file per key: whoever makes an artifact holds it alone, whoever
uses one shares it for the length of the build, and `prune` takes only what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lpxbuild.errors import HostError, UsageError
from lpxbuild.output import Advance, Output
from lpxbuild.pipeline.artifact import FILES, RECORD, Artifact
from lpxbuild.pipeline.digest import bar, nothing
from lpxbuild.pipeline.placing import TEMPORARY, exchange, remove_tree, sweep_files, sync_folder, write_atomically

USES = "uses.json"
STAGE_FOLDERS = ("source", "calibration", "checkpoint", "engine", "repository", "verify", "smoke")
"""Folders of artifacts; other parts of lpx keep other things in the cache."""
LOCKS = "locks"
DIGESTS = "digests"


def default_root() -> Path:
    """`$LPX_CACHE`, else `$XDG_CACHE_HOME/lpx`, else `~/.cache/lpx`."""
    if given := os.environ.get("LPX_CACHE"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lpx"


@dataclass(frozen=True)
class Entry:
    """One row of `lpx cache ls`; `size` in bytes, `age` in seconds since its last use."""

    stage: str
    key: str
    size: int
    age: float
    made_at: str
    used_by: tuple[str, ...]
    complete: bool


@dataclass(frozen=True)
class Verdict:
    """One row of `lpx cache verify`: `problems` is empty for a sound artifact."""

    stage: str
    key: str
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Pruned:
    """What `lpx cache prune` removed (or would), and what it left because a build uses it."""

    removed: tuple[Entry, ...]
    kept_in_use: tuple[Entry, ...]


class KeyLock:
    """The lock of one key, shared or exclusive; released when closed or when the process ends."""

    def __init__(self, path: Path, label: str, output: Output) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._label = label
        self._output = output
        self._said = False

    def try_shared(self) -> bool:
        return self._try(fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Take it alone if nobody else has it; otherwise a shared hold is lost (flock(2))."""
        return self._try(fcntl.LOCK_EX)

    def pause(self) -> None:
        """Wait a moment for the other holder; said once."""
        if not self._said:
            self._output.step(f"{self._label}: another lpx is working on the same artifact; waiting for it")
            self._said = True
        time.sleep(0.1)

    def shared(self) -> None:
        while not self.try_shared():
            self.pause()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _try(self, kind: int) -> bool:
        try:
            fcntl.flock(self._handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Cache:
    """The artifacts of this user.

    Args:
        root: folder of the cache; default `default_root()`.

    Raises:
        UsageError: `root` is a file.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or default_root()).absolute()
        if self.root.exists() and not self.root.is_dir():
            raise UsageError(f"{self.root} is not a folder", next="give --cache-dir, or set LPX_CACHE, to a folder")

    @property
    def digests(self) -> Path:
        """Where digests of files outside the cache are remembered."""
        return self.root / DIGESTS

    def lock(self, stage: str, key: str, *, output: Output) -> KeyLock:
        return KeyLock(self.root / LOCKS / f"{stage}-{key}", stage, output)

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact of a key as its record tells, unchecked; None when there is none that can be read."""
        try:
            artifact = Artifact.load(self.root / stage / key)
        except (OSError, ValueError, RecursionError):
            return None
        return artifact if (artifact.stage, artifact.key) == (stage, key) else None

    def check(self, artifact: Artifact, *, full: bool, advance: Advance = nothing) -> tuple[list[str], Artifact]:
        """Differences between record and files; refreshed times are saved when all is well."""
        problems, refreshed = artifact.problems(full=full, advance=advance)
        if not problems and refreshed is not artifact:
            refreshed.save()
        return problems, refreshed

    @contextlib.contextmanager
    def temporary(self, stage: str, key: str) -> Iterator[Path]:
        """A fresh folder next to the final one; removed at the end unless `commit` moved it.

        The caller holds the key's exclusive lock, so older temporary folders of this key belong to dead processes.
        """
        parent = self.root / stage
        parent.mkdir(parents=True, exist_ok=True)
        for stale in parent.glob(f"{TEMPORARY}{key}-*"):
            remove_tree(stale)
        folder = parent / f"{TEMPORARY}{key}-{uuid.uuid4().hex[:12]}"
        try:
            folder.mkdir()
            (folder / FILES).mkdir()
            yield folder
        finally:
            remove_tree(folder)

    def commit(self, temporary: Path, artifact: Artifact) -> Artifact:
        """Give a finished temporary folder its final name; an artifact of the same key is replaced.

        The caller has flushed the files and holds the exclusive lock.
        """
        target = self.root / artifact.stage / artifact.key
        for file in (target / USES,):
            if file.is_file():
                write_atomically(temporary / USES, file.read_text(encoding="utf-8"))
        artifact.save(temporary)
        old = exchange(temporary, target)
        sync_folder(target.parent)
        if old is not None:
            remove_tree(old)
        return replace(artifact, folder=target)

    def made(self, stage: str, sha256: str) -> bool:
        """Whether some artifact of the stage holds a file with this digest: then lpx wrote it."""
        artifacts = (self.find(stage, folder.name) for folder in self._folders() if folder.parent.name == stage)
        return any(r.sha256 == sha256 for found in artifacts if found is not None for r in found.files.values())

    def mark_used(self, artifact: Artifact, build: Path) -> None:
        """Note that a build folder shows this artifact, and that it was used just now."""
        path = artifact.folder / USES
        uses = _read_uses(path)
        if str(build) not in uses:
            write_atomically(path, json.dumps(sorted({*uses, str(build)}), indent=1), durable=False)
        with contextlib.suppress(OSError):
            os.utime(artifact.folder)

    def sweep(self, *, output: Output) -> int:
        """Remove temporary folders and files whose maker is gone; returns how many."""
        swept = sweep_files(self.digests, f"{TEMPORARY}*")
        swept += sum(sweep_files(self.root / stage, f"*/{TEMPORARY}*") for stage in STAGE_FOLDERS)
        for stale in [path for stage in STAGE_FOLDERS for path in (self.root / stage).glob(f"{TEMPORARY}*")]:
            key = stale.name.removeprefix(TEMPORARY).rpartition("-")[0]
            lock = self.lock(stale.parent.name, key, output=output)
            try:
                if lock.try_exclusive():
                    remove_tree(stale)
                    swept += 1
            finally:
                lock.close()
        return swept

    def ls(self) -> list[Entry]:
        """All artifacts, the most recently used first."""
        entries = (self._entry(folder) for folder in self._folders())
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: entry.age)

    def verify(self, *, output: Output) -> list[Verdict]:
        """Hash every file of every artifact.

        A damaged one stays where it is, marked so that the next build which needs it finds the damage and makes it
        anew.
        """
        verdicts = []
        folders = self._folders()
        found = [self.find(folder.parent.name, folder.name) for folder in folders]
        with bar(output, "cache verify", sum(artifact.size for artifact in found if artifact is not None)) as advance:
            for folder in folders:
                stage, key = folder.parent.name, folder.name
                lock = self.lock(stage, key, output=output)
                try:
                    lock.shared()
                    artifact = self.find(stage, key)
                    if artifact is None:
                        problems = [] if not folder.exists() else [f"{RECORD} cannot be read"]
                    else:
                        problems, refreshed = self.check(artifact, full=True, advance=advance)
                        if problems:
                            _doubt(refreshed).save()
                    verdicts.append(Verdict(stage, key, tuple(problems)))
                finally:
                    lock.close()
        for verdict in verdicts:  # after the bar, which they would tear
            output.step(f"{verdict.stage} {verdict.key[:12]}: {'damaged' if verdict.problems else 'sound'}")
        return verdicts

    def prune(
        self,
        *,
        older_than: float | None = None,
        max_bytes: int | None = None,
        keep: int | None = None,
        include_used: bool = False,
        dry_run: bool = False,
        output: Output,
    ) -> Pruned:
        """Remove artifacts, the longest unused first.

        Args:
            older_than: remove those unused for more than so many seconds.
            max_bytes: remove until the cache is not larger.
            keep: keep only so many per stage, the most recently used.
            include_used: also those that a build folder shows (its files stay, a rebuild has to make them anew).
            dry_run: say what would go, remove nothing.
            With none of the three limits everything that no build uses goes.
        """
        self.sweep(output=output)
        entries = self.ls()
        chosen: list[Entry] = []
        total = sum(entry.size for entry in entries)
        kept_per_stage: dict[str, int] = {}
        late: list[Entry] = []
        for entry in entries:
            kept_per_stage[entry.stage] = kept_per_stage.get(entry.stage, 0) + 1
            too_old = older_than is not None and entry.age > older_than
            too_many = keep is not None and kept_per_stage[entry.stage] > keep
            everything = older_than is None and max_bytes is None and keep is None
            (chosen if too_old or too_many or everything else late).append(entry)
        if max_bytes is not None:
            total -= sum(entry.size for entry in chosen if include_used or not entry.used_by)
            for entry in reversed(late):
                if total <= max_bytes:
                    break
                chosen.append(entry)
                total -= entry.size if include_used or not entry.used_by else 0
        removed: list[Entry] = []
        in_use: list[Entry] = []
        for entry in chosen:
            if entry.used_by and not include_used:
                in_use.append(entry)
            elif dry_run or self.discard(entry.stage, entry.key, output=output):
                removed.append(entry)
            else:
                in_use.append(replace(entry, used_by=("a build that runs now",)))
        return Pruned(tuple(removed), tuple(in_use))

    def discard(self, stage: str, key: str, *, output: Output) -> bool:
        """Remove one artifact; False when a running build holds it."""
        lock = self.lock(stage, key, output=output)
        try:
            if not lock.try_exclusive():
                return False
            folder = self.root / stage / key
            aside = folder.parent / f"{TEMPORARY}{key}-{uuid.uuid4().hex[:12]}"
            try:
                folder.rename(aside)
                remove_tree(aside)
            except FileNotFoundError:
                return True  # another prune was here first
            except OSError as error:
                raise HostError(
                    f"{folder} cannot be removed", why=str(error), next="check who owns it, then prune again"
                ) from error
            return True
        finally:
            lock.close()

    def _folders(self) -> Sequence[Path]:
        folders = [folder for stage in STAGE_FOLDERS for folder in (self.root / stage).glob("*")]
        return sorted(f for f in folders if f.is_dir() and not f.name.startswith(TEMPORARY))

    def _entry(self, folder: Path) -> Entry | None:
        """None where another lpx removed it since it was listed."""
        stage, key = folder.parent.name, folder.name
        artifact = self.find(stage, key)
        try:
            used = folder.stat().st_mtime
        except FileNotFoundError:
            return None
        return Entry(
            stage=stage,
            key=key,
            size=artifact.size if artifact is not None else 0,
            age=max(0.0, time.time() - used),
            made_at=artifact.made_at if artifact is not None else "",
            used_by=tuple(use for use in _read_uses(folder / USES) if _shows(Path(use), key)),
            complete=artifact is not None,
        )


def _read_uses(path: Path) -> list[str]:
    try:
        uses = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [str(use) for use in uses] if isinstance(uses, list) else []


def _shows(build: Path, key: str) -> bool:
    """Whether a build folder still shows the artifact (its manifest names the key)."""
    try:
        return key.encode() in (build / "manifest.json").read_bytes()
    except OSError:
        return False


def _doubt(artifact: Artifact) -> Artifact:
    """The record with impossible times: every file is hashed by the next check."""
    return replace(artifact, files={name: replace(record, ctime_ns=0) for name, record in artifact.files.items()})
