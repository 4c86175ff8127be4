"""Finding an artifact in the cache, or making it: lock, room, run, hash, flush, commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, LpxError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline.artifact import FILES, Artifact
from lpxbuild.pipeline.cache import Cache, KeyLock
from lpxbuild.pipeline.digest import bar, record_files, tree
from lpxbuild.pipeline.host import check_disk
from lpxbuild.pipeline.keys import key_of, version
from lpxbuild.pipeline.placing import free_bytes, make_large_files_read_only, remove_tree, room_errors, sync_tree
from lpxbuild.pipeline.stages import Stage, Work

FULL_DISK = 1 << 20
"""With fewer free bytes than this, an unexplained failure of a stage is a full disk."""


@dataclass
class Maker:
    """Artifacts of one build; holds a shared lock on each until `close`.

    Attributes:
        before_making: cheap checks, called before the first stage that has to run.
        after_running: called when a stage has run, before its result counts; raises where its input did not stand
            still, and returns what was noticed about that input before.
        room_for: stage → bytes it will write at least.
        force: make every stage again, even if the cache has it.
        paranoid: hash cached artifacts in full.
    """

    cache: Cache
    output: Output
    before_making: Callable[[Stage], None]
    after_running: Callable[[Stage], Sequence[str]]
    room_for: Callable[[Stage], int]
    force: bool = False
    paranoid: bool = False
    made: set[str] = field(default_factory=set)
    _hashed: set[tuple[str, str]] = field(default_factory=set)
    _locks: dict[tuple[str, str], KeyLock] = field(default_factory=dict)

    def close(self) -> None:
        for lock in self._locks.values():
            lock.close()
        self._locks.clear()

    def obtain(self, stage: Stage, components: Mapping[str, str], work: Work, *, full: bool = False) -> Artifact:
        """The artifact of a stage: from the cache when it is there and sound, else made now.

        Args:
            full: hash a cached one in full, whatever its times say.
        """
        key = key_of(stage.name, components)
        lock = self._lock(stage, key)
        lock.shared()
        fresh = self.force and stage.name not in self.made
        full = (full or self.paranoid) and (stage.name, key) not in self._hashed
        while True:
            artifact = self._sound(stage, key, full=full, said=False) if not fresh else None
            if artifact is not None:
                return artifact
            self.before_making(stage)
            while not lock.try_exclusive():
                lock.pause()
                if lock.try_shared():
                    found = self._sound(stage, key, full=full, said=True) if not fresh else None
                    if found is not None:
                        return found
            # Somebody else may have made it since the look above.
            artifact = self._sound(stage, key, full=full, said=True) if not fresh else None
            if artifact is None:
                artifact = self._make(stage, key, components, work)
            fresh = False
            lock.shared()
            # Between the two locks there is none (flock(2)): a prune or another --force may have been there.
            if (still := self.cache.find(stage.name, key)) is not None and still.digest == artifact.digest:
                return artifact

    def cached(self, stage: Stage, components: Mapping[str, str]) -> Artifact | None:
        """The artifact if the cache has it and it is sound; nothing is made."""
        key = key_of(stage.name, components)
        if self.cache.find(stage.name, key) is None:
            return None
        self._lock(stage, key).shared()
        return self._sound(stage, key, full=self.paranoid, said=True)

    def _lock(self, stage: Stage, key: str) -> KeyLock:
        place = (stage.name, key)
        if place not in self._locks:
            self._locks[place] = self.cache.lock(stage.name, key, output=self.output)
        return self._locks[place]

    def _sound(self, stage: Stage, key: str, *, full: bool, said: bool) -> Artifact | None:
        artifact = self.cache.find(stage.name, key)
        if artifact is None:
            folder = self.cache.root / stage.name / key
            if folder.exists() and not said:
                self.output.notice(f"{stage.name}: {folder} has no readable record; it is made again")
            return None
        with bar(self.output if full else None, f"hash {stage.name}", artifact.size) as advance:
            problems, artifact = self.cache.check(artifact, full=full, advance=advance)
        if problems:
            if not said:
                more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
                self.output.notice(
                    f"{stage.name}: the artifact in the cache is damaged: {problems[0]}{more}; it is made again"
                )
            return None
        if full:
            self._hashed.add((stage.name, key))
        return artifact

    def _make(self, stage: Stage, key: str, components: Mapping[str, str], work: Work) -> Artifact:
        output = self.output
        with room_errors(self.cache.root), self.cache.temporary(stage.name, key) as temporary:
            check_disk(self.cache.root, self.room_for(stage), stage.name)
            output.step(f"{stage.name}: working")
            destination = temporary / FILES
            started, notices_before = time.monotonic(), len(output.notices)
            try:
                report = self._run(stage, work, destination)
            except VerdictError:
                # The newest verdict counts: an earlier one to the contrary must not prove the next build.
                remove_tree(self.cache.root / stage.name / key)
                raise
            seconds = time.monotonic() - started
            notices = (*self.after_running(stage), *output.notices[notices_before:])
            make_large_files_read_only(destination)
            sync_tree(destination)
            names = tree(destination)
            with bar(output, f"hash {stage.name}", sum((destination / n).stat().st_size for n in names)) as advance:
                records = record_files((destination / name for name in names), advance)
            artifact = Artifact(
                stage=stage.name,
                key=key,
                folder=temporary,
                inputs=dict(components),
                files=dict(zip(names, records)),
                report=report,
                notices=notices,
                versions={name: version(name) for name in ("lpx", *stage.versions)},
                seconds=round(seconds, 3),
                made_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            )
            before = self.cache.find(stage.name, key) if self.force else None
            artifact = self.cache.commit(temporary, artifact)
        self.made.add(stage.name)
        self._hashed.add((stage.name, key))
        if before is not None and before.digest != artifact.digest and not stage.evidence:
            output.notice(f"{stage.name}: the same inputs gave other bytes than before ({before.digest[:12]}…)")
        output.step(f"{stage.name}: done in {seconds:.1f} s, {artifact.size:,} bytes in {len(names)} files")
        return artifact

    def _run(self, stage: Stage, work: Work, destination: Path) -> dict[str, Any]:
        try:
            return stage.run(work, destination)
        except LpxError:
            raise
        except OSError as error:
            # write(2) does not name its file: it is the one that was written last.
            if error.filename is None and (written := [destination / name for name in tree(destination)]):
                error.filename = str(max(written, key=lambda path: path.stat().st_mtime_ns))
            raise
        except Exception as error:
            # Libraries written in C++ report a full disk as an error of their own.
            free = free_bytes(self.cache.root)
            if free < FULL_DISK:
                raise HostError(
                    f"{destination}: no space left on device",
                    why=f"{stage.name} failed with {free:,} bytes free: {error}",
                    next="lpx cache prune --dry-run shows what could go; or set LPX_CACHE to a larger disk",
                ) from error
            raise
