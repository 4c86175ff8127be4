"""An artifact: the finished folder of one stage, with the record of what made it and what is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lpxbuild.output import Advance
from lpxbuild.pipeline.digest import FileRecord, combined, nothing, record_files, tree, with_current_times
from lpxbuild.pipeline.placing import write_atomically

FORMAT_VERSION = 1
RECORD = "artifact.json"
FILES = "files"


@dataclass(frozen=True)
class Artifact:
    """A complete artifact of the cache.

    Attributes:
        inputs: the components of its key, name → value (`recipe:quantization.format` → `none`).
        files: relative name → record.
        report: what the stage told about its work (tensor statistics, checks).
        seconds: wall time of the stage.
        made_at: UTC, ISO 8601.
    """

    stage: str
    key: str
    folder: Path
    inputs: Mapping[str, str]
    files: Mapping[str, FileRecord]
    report: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    made_at: str = ""

    @property
    def path(self) -> Path:
        """The folder that the next stage reads."""
        return self.folder / FILES

    @property
    def digest(self) -> str:
        """One digest for names and bytes of all files."""
        return combined({name: record.sha256 for name, record in self.files.items()})

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def describe(self) -> dict[str, Any]:
        """JSON form, for the record in the cache."""
        data = {name: value for name, value in asdict(self).items() if name not in ("folder", "files", "notices")}
        return data | {
            "digest": self.digest,
            "notices": list(self.notices),
            "files": {name: record.as_dict() for name, record in sorted(self.files.items())},
        }

    def described_briefly(self) -> dict[str, Any]:
        """JSON form for manifest.json: of the files only digests and sizes."""
        files = {name: {"sha256": record.sha256, "size": record.size} for name, record in sorted(self.files.items())}
        return self.describe() | {"files": files}

    def save(self, folder: Path | None = None) -> None:
        """Write the record, atomically."""
        text = json.dumps({"format_version": FORMAT_VERSION, **self.describe()}, indent=1, ensure_ascii=False)
        write_atomically((folder or self.folder) / RECORD, text)

    @classmethod
    def load(cls, folder: Path) -> Artifact:
        """Read a record back.

        Raises:
            OSError, ValueError: there is none, or it is not one that `save` wrote.
        """
        data = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        try:
            if data["format_version"] != FORMAT_VERSION:
                raise ValueError(f"artifact format {data['format_version']}, this lpx writes {FORMAT_VERSION}")
            artifact = cls(
                stage=data["stage"],
                key=data["key"],
                folder=folder,
                inputs=dict(data["inputs"]),
                files={name: FileRecord.from_dict(record) for name, record in data["files"].items()},
                report=dict(data["report"]),
                notices=tuple(data["notices"]),
                versions=dict(data["versions"]),
                seconds=float(data["seconds"]),
                made_at=data["made_at"],
            )
            if data["digest"] != artifact.digest:
                raise ValueError("the record's digest is not that of its files")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / RECORD} is not an artifact record: {error!r}") from error
        return artifact

    def problems(self, *, full: bool, advance: Advance = nothing) -> tuple[list[str], Artifact]:
        """Compare the files with the record.

        Args:
            full: hash every file; otherwise only those whose size or times differ.
            advance: told the bytes that were hashed.

        Returns:
            (one sentence per difference, the artifact with refreshed times).
        """
        found: list[str] = []
        present = set(tree(self.path)) if self.path.is_dir() else set()
        found += [f"{name} is missing" for name in sorted(set(self.files) - present)]
        found += [f"{name} does not belong there" for name in sorted(present - set(self.files))]
        doubtful: list[str] = []
        for name in sorted(set(self.files) & present):
            path = self.path / name
            if path.is_symlink() or not path.is_file():
                found.append(f"{name} is not a plain file any more")
                continue
            status = path.stat()
            if status.st_size != self.files[name].size:
                found.append(f"{name} has {status.st_size:,} bytes, {self.files[name].size:,} were written")
            elif full or not self.files[name].unchanged(status):
                doubtful.append(name)
        files = dict(self.files)
        for name, record in zip(doubtful, record_files((self.path / name for name in doubtful), advance)):
            if record.sha256 == self.files[name].sha256:
                files[name] = record
            else:
                found.append(f"{name} was changed: SHA-256 {record.sha256[:12]}…, {self.files[name].sha256[:12]}… made")
        return found, self if files == self.files else replace(self, files=files)

    def with_current_times(self) -> Artifact:
        """The record after lpx itself made links of the files (see `digest.with_current_times`)."""
        files = with_current_times(self.path, self.files)
        return self if files == self.files else replace(self, files=files)


@dataclass(frozen=True)
class ShownArtifact(Artifact):
    """An artifact that only a build folder holds any more: its files lie in `folder` itself, it has no record there."""

    @property
    def path(self) -> Path:
        return self.folder

    @classmethod
    def described(cls, described: Mapping[str, Any], folder: Path, files: Mapping[str, FileRecord]) -> ShownArtifact:
        """From what a manifest says of the stage (`Artifact.describe`) and the files as they lie there.

        Raises:
            KeyError, TypeError, ValueError: the manifest does not say it, or of other files.
        """
        made = cls(
            stage=described["stage"],
            key=described["key"],
            folder=folder,
            inputs=dict(described["inputs"]),
            files=dict(files),
            report=dict(described["report"]),
            notices=tuple(described["notices"]),
            versions=dict(described["versions"]),
            seconds=float(described["seconds"]),
            made_at=described["made_at"],
        )
        if made.digest != described["digest"]:
            raise ValueError(f"{folder} holds other files than the stage made")
        return made
