"""`manifest.json`: what a build folder holds, what made it, and what was proven of it.

The file carries a checksum over itself, so that a cut or edited manifest is told from a whole one; its `state` is
taken from the evidence in the cache by every build, never from the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lpxbuild.errors import UsageError
from lpxbuild.pipeline.digest import FileRecord, sha256_file, tree
from lpxbuild.pipeline.placing import write_atomically

FORMAT_VERSION = 1
FILE = "manifest.json"
PROVEN = "proven"
NOT_PROVEN = "built, not proven"
TEXTS = "."
"""Key of the view under which files beside the stage folders are recorded."""

_KEYS = ("name", "state", "backend", "recipe", "inputs", "stages", "view", "versions", "notices", "evidence")
_VOLATILE = ("written_at", "checksum")


def built_to(stage: str) -> str:
    """The state of a build that stopped after a stage."""
    return f"built to {stage}"


@dataclass(frozen=True)
class Manifest:
    """A validated manifest; `data` is the JSON document."""

    data: Mapping[str, Any]

    @property
    def state(self) -> str:
        return str(self.data["state"])

    @property
    def stages(self) -> Mapping[str, Mapping[str, Any]]:
        """Stage → key, digest, inputs, files, report, seconds, versions."""
        stages: Mapping[str, Mapping[str, Any]] = self.data["stages"]
        return stages

    def view(self, folder: str) -> dict[str, FileRecord]:
        """What lpx put into a folder of the build (`TEXTS`: beside the folders)."""
        return {name: FileRecord.from_dict(record) for name, record in self.data["view"].get(folder, {}).items()}

    def same_as(self, data: Mapping[str, Any]) -> bool:
        """Whether a new document would say nothing else."""
        mine = {name: value for name, value in self.data.items() if name not in _VOLATILE}
        return bool(mine == json.loads(json.dumps({"format_version": FORMAT_VERSION, **data})))


def write(folder: Path, data: Mapping[str, Any]) -> Manifest:
    """Write `manifest.json` of a build folder atomically and read it back."""
    whole = {
        "format_version": FORMAT_VERSION,
        **data,
        "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    whole["checksum"] = _checksum(whole)
    write_atomically(folder / FILE, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
    return read(folder)


def read(folder: Path) -> Manifest:
    """Read and validate the manifest of a build folder.

    Raises:
        UsageError: there is none, or it is not what lpx wrote.
    """
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format_version") != FORMAT_VERSION:
            raise ValueError(f"not a manifest of format {FORMAT_VERSION}")
        if missing := [key for key in (*_KEYS, *_VOLATILE) if key not in data]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        if data["checksum"] != _checksum(data):
            raise ValueError("its checksum does not fit: it was edited or cut")
        manifest = Manifest(data)
        for name in data["view"]:
            manifest.view(name)
    except FileNotFoundError:
        raise UsageError(f"{folder} is not a build folder: it has no {FILE}", next="lpx build RECIPE") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be used",
            why=str(error),
            next="run lpx build again: it keeps the file aside and writes anew",
        ) from error
    return manifest


def differences(folder: Path, manifest: Manifest, *, full: bool = False) -> list[str]:
    """What in a build folder is not as the manifest says: one sentence per file, empty when all is as built.

    A file whose size and times are as recorded is taken as unchanged unless `full`.
    """
    found: list[str] = []
    for part in manifest.data["view"]:
        records = manifest.view(part)
        base = folder if part == TEXTS else folder / part
        present = set(records) if part == TEXTS else (set(tree(base)) if base.is_dir() else set())
        found += [f"{part}/{name} does not belong there" for name in sorted(present - set(records))]
        for name, record in records.items():
            path = base / name
            if not path.is_file() or path.is_symlink():
                found.append(f"{_label(part, name)} is missing")
            elif (full or not record.unchanged(path.stat())) and sha256_file(path) != record.sha256:
                found.append(f"{_label(part, name)} was changed after the build")
    return found


def _label(part: str, name: str) -> str:
    return name if part == TEXTS else f"{part}/{name}"


def _checksum(data: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in data.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
