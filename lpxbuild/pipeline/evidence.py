"""What was proven of a build, and what a later failure takes back: the newest verdict counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline.artifact import Artifact
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import record_file
from lpxbuild.pipeline.manifest import NOT_PROVEN, PROVEN, TEXTS, Manifest, built_to
from lpxbuild.pipeline.outcomes import EvidenceFailed
from lpxbuild.pipeline.placing import write_atomically
from lpxbuild.pipeline.stages import STAGES
from lpxbuild.pipeline.workspace import Workspace


def collected(
    artifacts: Mapping[str, Artifact],
    failure: EvidenceFailed | None,
    left_out: Mapping[str, str],
    workspace: Workspace,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest's `evidence`, and the reports as files of the build folder by relative name.

    Args:
        workspace: the build folder as it was so far.
    """
    evidence: dict[str, Any] = {"ran": []}
    texts: dict[str, str] = {}
    for stage in STAGES:
        if not stage.evidence:
            continue
        artifact = artifacts.get(stage.name)
        if failure is not None and failure.stage == stage.name:
            evidence[stage.name] = {"passed": False, "report": failure.evidence}
            texts |= {f"evidence/{name}": text for name, text in failure.files.items()}
        elif artifact is not None:
            # A verdict that was negative, or none, made no artifact.
            evidence[stage.name] = {"passed": True, "report": artifact.report, "made_at": artifact.made_at}
            texts |= {f"evidence/{name}": (artifact.path / name).read_text(encoding="utf-8") for name in artifact.files}
        else:
            if stage.name in left_out:
                evidence.setdefault("left_out", {})[stage.name] = left_out[stage.name]
            continue
        evidence["ran"].append(stage.name)
    if "verify" not in evidence:
        verdict, names = standing(workspace.manifest(), artifacts, workspace.root)
        if verdict:
            evidence |= {"verify": verdict, "ran": ["verify", *evidence["ran"]]}
            texts |= {name: (workspace.root / name).read_text(encoding="utf-8") for name in names}
    return evidence, texts


def state_of(
    artifacts: Mapping[str, Artifact],
    evidence: Mapping[str, Any],
    failure: EvidenceFailed | None,
    *,
    verify_required: bool,
) -> str:
    """The state of a build: "built to STAGE", "built, not proven" or "proven"."""
    if failure is not None:
        return NOT_PROVEN
    if "smoke" not in artifacts:
        done = [stage.name for stage in STAGES if stage.name in artifacts and not stage.evidence]
        return built_to(done[-1] if done else STAGES[0].name)
    passed = evidence.get("verify", {}).get("passed")
    return NOT_PROVEN if passed is False or (verify_required and not passed) else PROVEN


def standing(old: Manifest | None, artifacts: Mapping[str, Artifact], root: Path) -> tuple[dict[str, Any], list[str]]:
    """A negative verify of the very files that a build without one ends with: it stays until a verify passes.

    Returns:
        What the manifest's `evidence` says of it, and the names of its reports in the build folder `root`; both empty
        where there is none.
    """
    verdict = old.data["evidence"].get("verify", {}) if old is not None else {}
    if old is None or "verify" in artifacts or verdict.get("passed") is not False or not _negative(verdict):
        return {}, []
    for name in ("checkpoint", "engine"):
        now = artifacts.get(name)
        if (now.digest if now is not None else None) != old.stages.get(name, {}).get("digest"):
            return {}, []
    names = [name for name in old.data["view"].get(TEXTS, {}) if name.startswith("evidence/verify.")]
    return verdict, [name for name in names if (root / name).is_file()]


def _negative(verdict: Mapping[str, Any]) -> bool:
    """Not "self-consistent": there nothing was compared, so nothing is refuted."""
    return bool(verdict["report"].get("status") != "self-consistent")


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
        "ran": [*(name for name in manifest.data["evidence"]["ran"] if name != "smoke"), "smoke"],
        "smoke": {"passed": False, "report": found, "made_at": _now()},
    }
    # Written anew with these: the time and the checksum.
    data = {name: value for name, value in manifest.data.items() if name not in ("written_at", "checksum")}
    manifests.write(root, {**data, "state": NOT_PROVEN, "evidence": evidence, "view": view})


def refuted(manifest: Manifest | None, cache: Cache) -> dict[str, str]:
    """Evidence that passed and lies in the cache, and of which the manifest knows a later failure: stage → key."""
    found: dict[str, str] = {}
    for stage in STAGES:
        if manifest is None or not stage.evidence:
            continue
        verdict = manifest.data["evidence"].get(stage.name, {})
        key = manifest.stages.get(stage.name, {}).get("key")
        if verdict.get("passed") is not False or "made_at" not in verdict or key is None or not _negative(verdict):
            continue
        passed = cache.find(stage.name, str(key))
        if passed is not None and passed.made_at <= verdict["made_at"]:
            found[stage.name] = passed.key
    return found


def forget_refuted(manifest: Manifest | None, cache: Cache, *, output: Output) -> None:
    """Take refuted proofs out of the cache, so that they are tried again."""
    for stage, key in refuted(manifest, cache).items():
        cache.discard(stage, key, output=output)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
