"""A smoke test that fails after the build: the newest verdict counts, for the manifest and for the next build."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import record_file
from lpxbuild.pipeline.manifest import NOT_PROVEN, TEXTS, Manifest
from lpxbuild.pipeline.placing import write_atomically
from lpxbuild.pipeline.workspace import Workspace


def note_failure(build: Path, tested: Manifest, report: Any, cache: Cache, *, output: Output) -> None:
    """Lower the state of a build whose very files have just failed; a build that changed meanwhile is left alone."""
    workspace = Workspace(build, cache, output)
    try:
        with workspace.locked():
            now = manifests.read(workspace.root)
            if now.data["checksum"] != tested.data["checksum"]:
                return
            _lower(workspace.root, now, report)
    except (OSError, UsageError) as error:
        output.notice(f"{build}: its manifest still says {tested.state}; it cannot be written: {error}")
        return
    if tested.state != NOT_PROVEN:
        output.notice(f"{build} was {tested.state!r}; its state is now {NOT_PROVEN!r}")


def _lower(root: Path, manifest: Manifest, report: Any) -> None:
    found = report.as_dict()
    view = {part: dict(records) for part, records in manifest.data["view"].items()}
    texts = {"evidence/smoke.json": json.dumps(found, indent=1, ensure_ascii=False) + "\n"}
    texts["evidence/smoke.xml"] = report.junit()
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(root / name, text)
        view[TEXTS][name] = record_file(root / name).as_dict()
    evidence = {
        **manifest.data["evidence"],
        "ran": ["smoke"],
        "smoke": {"passed": False, "report": found, "made_at": _now()},
    }
    # Written anew with these: the time and the checksum.
    data = {name: value for name, value in manifest.data.items() if name not in ("written_at", "checksum")}
    manifests.write(root, {**data, "state": NOT_PROVEN, "evidence": evidence, "view": view})


def refuted(manifest: Manifest | None, cache: Cache) -> str | None:
    """The key of a passed smoke test in the cache that the manifest knows a later failure of."""
    if manifest is None:
        return None
    verdict = manifest.data["evidence"].get("smoke", {})
    key = manifest.stages.get("smoke", {}).get("key")
    if verdict.get("passed") is not False or "made_at" not in verdict or key is None:
        return None
    passed = cache.find("smoke", str(key))
    return passed.key if passed is not None and passed.made_at <= verdict["made_at"] else None


def forget_refuted(manifest: Manifest | None, cache: Cache, *, output: Output) -> None:
    """Take a refuted proof out of the cache, so that the smoke test runs again."""
    key = refuted(manifest, cache)
    if key is not None:
        cache.discard("smoke", key, output=output)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
