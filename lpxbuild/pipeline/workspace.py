"""`build/NAME/`: the view of a build that people and servers use.

Its folders show artifacts of the cache. A file that somebody changed by hand is told from one that lpx wrote, moved
to `kept/`, said, and put back; nothing of the old view goes before the new one is complete beside it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline.artifact import Artifact, ShownArtifact
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import FileRecord, bar, record_file, sha256_file, tree, with_current_times
from lpxbuild.pipeline.host import check_disk
from lpxbuild.pipeline.manifest import TEXTS, Manifest
from lpxbuild.pipeline.placing import (
    TEMPORARY,
    exchange,
    place_file,
    remove_tree,
    sweep_files,
    sync_tree,
    write_atomically,
)
from lpxbuild.pipeline.stages import SHOWN

KEPT = "kept"
LOGS = "logs"
LOCK = ".lock"

Records = dict[str, FileRecord]


class Workspace:
    """One build folder."""

    def __init__(self, root: Path, cache: Cache, output: Output) -> None:
        self.root = root.absolute()
        self.cache = cache
        self.output = output

    def manifest(self) -> Manifest | None:
        """The manifest as it lies there; None when there is none or it cannot be used."""
        try:
            return manifests.read(self.root)
        except UsageError:
            return None

    def shown(self, manifest: Manifest, stage: str, *, full: bool) -> Artifact | None:
        """A stage as this folder shows it, if its files are those that the manifest records; None otherwise.

        Args:
            full: hash every file, whatever its times say.
        """
        folder, records = self.root / stage, manifest.view(stage)
        if stage not in SHOWN or not records or not folder.is_dir() or sorted(records) != tree(folder):
            return None
        found: Records = {}
        for name, record in records.items():
            record_now = self._ours(stage, name, None, record, full=full)
            if record_now is None or record_now.sha256 != record.sha256:
                return None
            found[name] = record_now
        try:
            return ShownArtifact.described(manifest.stages[stage], folder, found)
        except (KeyError, TypeError, ValueError):
            return None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Alone with the folder; another build of the same name waits."""
        self.root.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.output.step(f"{self.root}: another lpx build is writing here; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def update(
        self, artifacts: Mapping[str, Artifact], texts: Mapping[str, str], data: Mapping[str, Any], *, full: bool
    ) -> Manifest:
        """Show these artifacts and texts, and write the manifest last.

        Args:
            artifacts: by stage; a stage of `SHOWN` that is absent is taken out of the view.
            texts: contents of files beside the folders, by relative name.
            data: the manifest without `view`.
            full: hash every file that is there, whatever its times say.
        """
        with self.locked():
            # Files by their locks: another build of this name may be writing its lock file here.
            sweep_files(self.root, f"{TEMPORARY}*")
            for stale in self.root.glob(f"{TEMPORARY}*"):
                if stale.is_dir():
                    remove_tree(stale)
            old = self.manifest()
            if old is None and (self.root / manifests.FILE).exists():
                self._keep_aside(self.root / manifests.FILE, manifests.FILE, "is damaged or was edited")
            view: dict[str, Records] = {}
            for stage in SHOWN:
                known = old.view(stage) if old is not None else {}
                shown = self._show(stage, artifacts.get(stage), known, full=full)
                if stage not in artifacts:
                    self._retire(stage, old)
                if shown is not None:
                    view[stage] = shown
            view[TEXTS] = self._write_texts(texts, old.view(TEXTS) if old is not None else {})
            # Making links moved the ctime of files that cache, other artifacts and this view share.
            for artifact in artifacts.values():
                if isinstance(artifact, ShownArtifact):
                    continue
                fresh = artifact.with_current_times()
                if fresh is not artifact:
                    fresh.save()
                self.cache.mark_used(artifact, self.root)
            view = {
                part: with_current_times(self.root if part == TEXTS else self.root / part, records)
                for part, records in view.items()
            }
            shown_data = {
                part: {name: record.as_dict() for name, record in sorted(records.items())}
                for part, records in view.items()
            }
            whole = {**data, "view": shown_data}
            if old is not None and old.same_as(whole):
                return old
            return manifests.write(self.root, whole)

    def _show(self, stage: str, artifact: Artifact | None, known: Records, *, full: bool) -> Records | None:
        folder = self.root / stage
        found: Records = {}
        complete = True
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            self._keep_aside(folder, stage, "is not a folder")
        present = tree(folder) if folder.is_dir() else []
        for name in present:
            record = self._ours(stage, name, artifact, known.get(name), full=full)
            if record is None:
                reason = "was changed by hand" if name in known else "does not belong there"
                self._keep_aside(folder / name, f"{stage}/{name}", reason)
                complete = False
            elif artifact is None or name not in artifact.files or record.sha256 != artifact.files[name].sha256:
                complete = False
            else:
                found[name] = record
        if artifact is None:
            return None
        lost = sorted(set(known) & set(artifact.files) - set(present))
        if lost:
            what = f"{stage}/{lost[0]}" if len(lost) < len(known) else stage
            more = f" (and {len(lost) - 1} more)" if 1 < len(lost) < len(known) else ""
            self.output.notice(f"{self.root / what} was missing{more}; restored from the cache")
        if complete and found.keys() == artifact.files.keys() and folder.is_dir():
            return found
        if isinstance(artifact, ShownArtifact):
            raise HostError(
                f"{folder} changed while this build looked at it",
                why="only this folder had it; what was changed by hand is in kept/",
                next="run the same command again",
            )
        return self._replace(stage, artifact)

    def _ours(
        self, stage: str, name: str, artifact: Artifact | None, record: FileRecord | None, *, full: bool
    ) -> FileRecord | None:
        """The record of a file that lpx wrote, None for one that it did not."""
        path = self.root / stage / name
        status = path.lstat()
        if path.is_symlink() or not path.is_file():
            return None
        cached = artifact.files.get(name) if artifact is not None else None
        if not full:
            if record is not None and record.unchanged(status):
                return record
            if artifact is not None and cached is not None and cached.unchanged(status):
                same_disk = (artifact.path / name).lstat().st_dev == status.st_dev
                if same_disk:
                    return cached
        sha256 = sha256_file(path)
        written = {known.sha256 for known in (record, cached) if known is not None}
        if sha256 in written or (record is None and self.cache.made(stage, sha256)):
            return FileRecord.of(sha256, status)
        return None

    def _replace(self, stage: str, artifact: Artifact) -> Records:
        copied_over = artifact.path.stat().st_dev != self.root.stat().st_dev
        if copied_over:
            check_disk(self.root, artifact.size, f"build/{self.root.name}/{stage}")
        temporary = self.root / f"{TEMPORARY}{stage}-{uuid.uuid4().hex[:12]}"
        temporary.mkdir()
        try:
            with bar(self.output if copied_over else None, f"copy {stage}", artifact.size) as advance:
                for name, record in artifact.files.items():
                    target = temporary / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    copied = place_file(artifact.path / name, target, advance)
                    if copied and copied != record.sha256:
                        raise HostError(
                            f"{artifact.path / name} changed while it was being copied",
                            why=f"SHA-256 {record.sha256[:12]}… was made, {copied[:12]}… was read",
                            next="run lpx build again; if it repeats, check the disk (lpx cache verify)",
                        )
            sync_tree(temporary)
            old = exchange(temporary, self.root / stage)
            if old is not None:
                remove_tree(old)
        finally:
            remove_tree(temporary)
        folder = self.root / stage
        return {name: FileRecord.of(record.sha256, (folder / name).lstat()) for name, record in artifact.files.items()}

    def _retire(self, stage: str, old: Manifest | None) -> None:
        """Take a stage out of the view; where nothing else has it, it is moved aside."""
        folder = self.root / stage
        if not folder.exists():
            return
        key = str(old.stages.get(stage, {}).get("key", "")) if old is not None else ""
        in_cache = bool(key) and self.cache.find(stage, key) is not None
        if in_cache or not tree(folder):
            remove_tree(folder)
            if in_cache:
                self.output.notice(f"{folder} belongs to an earlier build: it is shown no more, the cache keeps it")
            return
        target = self._aside(stage)
        folder.rename(target)
        self.output.notice(f"{folder} belongs to an earlier build that the cache does not have: moved to {target}")

    def _write_texts(self, texts: Mapping[str, str], known: Records) -> Records:
        records: Records = {}
        for name in sorted(texts.keys() | known.keys()):
            path = self.root / name
            wanted = texts.get(name)
            if path.is_file() and not path.is_symlink():
                before = known.get(name)
                record = before if before is not None and before.unchanged(path.stat()) else record_file(path)
                if wanted is not None and path.read_text(encoding="utf-8", errors="surrogateescape") == wanted:
                    records[name] = record
                    continue
                if before is None or before.sha256 != record.sha256:
                    self._keep_aside(path, name, "was changed by hand")
            if wanted is None:
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, wanted)
            records[name] = record_file(path)
        return records

    def _free_place(self, name: str) -> Path:
        """A path under `kept/` that nothing has; a file that was kept under a folder's name is gone around."""
        *folders, last = name.split("/")
        place = self.root / KEPT
        for part in folders:
            place = next(p for p in _numbered(place / part) if p.is_dir() or not os.path.lexists(p))
        return next(p for p in _numbered(place / last) if not os.path.lexists(p))

    def _keep_aside(self, path: Path, name: str, reason: str) -> None:
        target = self._aside(name)
        path.rename(target)
        self.output.notice(f"{path} {reason}: it is not used and was moved to {target}; what lpx built is put back")

    def _aside(self, name: str) -> Path:
        """A free name below `kept/`."""
        target = self._free_place(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _numbered(path: Path) -> Iterator[Path]:
    """`name`, `name.1`, `name.2` …"""
    yield path
    for number in itertools.count(1):
        yield path.with_name(f"{path.name}.{number}")
