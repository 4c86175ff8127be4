"""`recipe.lock`: the commit, the file digests and the versions that a recipe was built with.

It lies beside the recipe under the recipe's name (`recipe.yaml` → `recipe.lock`) and is meant to be committed. An
ordinary build pins the commit from it and brings the rest up to date; `--locked` refuses any drift.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError, UsageError

FORMAT_VERSION = 1
HEADER = "# Written by lpx build; pins what this recipe was built with. Commit it; check it with lpx build --locked.\n"


@dataclass(frozen=True)
class Lock:
    """Contents of a lock file.

    Attributes:
        source: `model.source` of the recipe.
        requested: `model.revision` of the recipe.
        commit: what it stood for on the hub; None for local sources.
        files: SHA-256 by name.
        versions: version by distribution.
    """

    source: str
    requested: str | None
    commit: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def fits(self, source: str, requested: str | None) -> bool:
        """Whether the lock was made for this source at this revision."""
        return (self.source, self.requested) == (source, requested)

    def drift(self, new: Lock) -> list[str]:
        """One line per pinned thing that `new` has otherwise: `config.json: abc… → def…`."""
        lines = []
        for label, old, now in (
            ("model.source", self.source, new.source),
            ("model.revision", self.requested, new.requested),
            ("commit", self.commit, new.commit),
        ):
            if old != now:
                lines.append(f"{label}: {old or '(none)'} → {now or '(none)'}")
        lines += _drift(self.files, new.files, "file ")
        return lines + self.version_drift(new.versions)

    def version_drift(self, versions: Mapping[str, str]) -> list[str]:
        """Drift of the versions that a build needs; pinned ones that it does not need are not compared."""
        return _drift(
            {name: self.versions[name] for name in versions if name in self.versions}, versions, "version of "
        )


def _drift(old: Mapping[str, str], new: Mapping[str, str], label: str) -> list[str]:
    return [
        f"{label}{name}: {_short(old.get(name))} → {_short(new.get(name))}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]


def _short(value: str | None) -> str:
    if value is None:
        return "(absent)"
    return value[:12] + "…" if len(value) == 64 else value


def read(path: Path) -> Lock | None:
    """The lock file at `path`; None when there is none.

    Raises:
        UsageError: it is there and cannot be read.
    """
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        if data["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {data['format_version']}, this lpx reads {FORMAT_VERSION}")
        model = data["model"]
        return Lock(
            source=model["source"],
            requested=model["revision"],
            commit=model["commit"],
            files={str(name): str(value) for name, value in data["files"].items()},
            versions={str(name): str(value) for name, value in data["versions"].items()},
        )
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, (KeyError, TypeError, AttributeError)):
            reason = "it has not the keys that lpx writes: format_version, model, files, versions"
        else:
            reason = str(getattr(error, "problem", None) or error).splitlines()[0]
        raise UsageError(
            f"{path} cannot be read as a lock file",
            why=reason,
            next=f"restore it, or remove it to pin anew: rm {path}",
        ) from error


def text(lock: Lock) -> str:
    """The file's contents: sorted YAML, the same bytes for the same pins."""
    import yaml

    data: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "model": {"source": lock.source, "revision": lock.requested, "commit": lock.commit},
        "files": dict(sorted(lock.files.items())),
        "versions": dict(sorted(lock.versions.items())),
    }
    return HEADER + yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120)


def refuse_drift(path: Path, lines: list[str]) -> None:
    """Raises SourceError naming what moved, if anything did."""
    if lines:
        raise SourceError(
            f"--locked: {len(lines)} pinned {'thing differs' if len(lines) == 1 else 'things differ'} from {path}",
            why="\n".join(lines),
            next="restore what is pinned, or build without --locked to pin the new state",
        )
