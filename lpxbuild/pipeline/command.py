"""What `lpx build` and `lpx cache` call: one call each, then the answer through the output object."""

from __future__ import annotations

import math
import shlex
from dataclasses import asdict
from pathlib import Path

from lpxbuild.errors import UsageError, VerdictError
from lpxbuild.output import Output
from lpxbuild.pipeline.building import BuildResult
from lpxbuild.pipeline.building import build as run_build
from lpxbuild.pipeline.cache import Cache, Entry
from lpxbuild.pipeline.explaining import why as explain
from lpxbuild.pipeline.host import mb
from lpxbuild.pipeline.placing import room_errors

DAY = 86400.0


def build(
    recipe: str,
    *,
    to: str | None,
    overrides: list[str],
    why: bool,
    force: bool,
    locked: bool,
    paranoid: bool,
    build_dir: Path,
    cache_dir: Path | None,
    output: Output,
) -> None:
    """Build a recipe file or a shipped recipe, or say what would run."""
    from lpxbuild.recipe import Recipe

    path = recipe_file(recipe)
    loaded = Recipe.load(path, overrides)
    if why:
        explanation = explain(
            loaded,
            to=to,
            force=force,
            recipe_path=path,
            cache_dir=cache_dir,
            build_dir=build_dir,
            output=output,
        )
        output.result(explanation.as_dict(), explanation.text())
        return
    result = run_build(
        loaded,
        to=to,
        force=force,
        locked=locked,
        paranoid=paranoid,
        recipe_path=path,
        cache_dir=cache_dir,
        build_dir=build_dir,
        output=output,
    )
    output.result(_answer(result), _text(result, build_dir))


def recipe_file(recipe: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped one."""
    path = Path(recipe)
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) != 1:
        return path
    from lpxbuild.recipe.library import find

    return find(recipe)


def cache_ls(cache_dir: Path | None, *, output: Output) -> None:
    """List the artifacts of the cache."""
    cache = Cache(cache_dir)
    with room_errors(cache.root):
        entries = cache.ls()
    rows = [
        (entry.stage, entry.key[:12], mb(entry.size), _age(entry.age), ", ".join(entry.used_by) or "-")
        for entry in entries
    ]
    table = output.table(("stage", "key", "size", "last used", "shown by"), rows) if rows else ""
    total = sum(entry.size for entry in entries)
    output.result(
        {"cache": str(cache.root), "bytes": total, "artifacts": [_row(entry) for entry in entries]},
        f"{table}\n{cache.root}: {len(entries)} artifacts, {mb(total)}".lstrip("\n"),
    )


def cache_verify(cache_dir: Path | None, *, output: Output) -> None:
    """Hash every artifact.

    Raises:
        VerdictError: some are damaged; the next build that needs one makes it again.
    """
    cache = Cache(cache_dir)
    with room_errors(cache.root):
        verdicts = cache.verify(output=output)
    damaged = [verdict for verdict in verdicts if verdict.problems]
    if damaged:
        raise VerdictError(
            f"{len(damaged)} of {len(verdicts)} artifacts in {cache.root} are damaged",
            why="\n".join(f"{verdict.stage} {verdict.key[:12]}: {'; '.join(verdict.problems)}" for verdict in damaged),
            next="lpx build RECIPE makes what it needs again; lpx cache prune removes what no build shows",
            details={"cache": str(cache.root), "damaged": [asdict(verdict) for verdict in damaged]},
        )
    output.result(
        {"cache": str(cache.root), "sound": len(verdicts)}, f"{cache.root}: {len(verdicts)} artifacts, all sound"
    )


def cache_prune(
    cache_dir: Path | None,
    *,
    max_age_days: float | None,
    max_gib: float | None,
    everything: bool,
    dry_run: bool,
    output: Output,
) -> None:
    """Remove artifacts; what a build folder shows is left unless everything goes, and said either way."""
    for option, value in (("--older-than", max_age_days), ("--max-size", max_gib)):
        if value is None:
            continue
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{option} {value}: not a number from 0 up", next=f"for example {option} 30")
        if everything:
            raise UsageError(
                f"--all and {option} exclude each other", why="--all removes every artifact", next="give one of them"
            )
    cache = Cache(cache_dir)
    with room_errors(cache.root):
        pruned = cache.prune(
            older_than=max_age_days * DAY if max_age_days is not None else None,
            max_bytes=int(max_gib * (1 << 30)) if max_gib is not None else None,
            include_used=everything,
            dry_run=dry_run,
            output=output,
        )
    verb = "would be removed" if dry_run else "removed"
    lines = [f"{verb}: {_described(entry)}" for entry in pruned.removed]
    lines += [f"kept, shown by {', '.join(entry.used_by)}: {_described(entry)}" for entry in pruned.kept_in_use]
    size = sum(entry.size for entry in pruned.removed)
    lines.append(f"{len(pruned.removed)} artifacts {verb}, {mb(size)}; {len(pruned.kept_in_use)} kept because in use")
    output.result(
        {
            "dry_run": dry_run,
            "removed": [_row(entry) for entry in pruned.removed],
            "kept_in_use": [_row(entry) for entry in pruned.kept_in_use],
            "bytes": size,
        },
        "\n".join(lines),
    )


def _answer(result: BuildResult) -> dict[str, object]:
    stages = {
        name: {"key": stage["key"], "digest": stage["digest"], "seconds": stage["seconds"], "made": name in result.made}
        for name, stage in result.manifest.stages.items()
    }
    return {"path": str(result.path), "state": result.state, "stages": stages}


def _text(result: BuildResult, build_dir: Path) -> str:
    shown = build_dir / result.path.name
    reused = [name for name in result.manifest.stages if name not in result.made]
    how = f"made {', '.join(result.made)}" if result.made else "nothing to do"
    if result.made and reused:
        how += f"; re-used {', '.join(reused)}"
    text = "\n".join([*_answers(result), f"{shown}: {result.state} ({how})"])
    return f"{text}\nnext: lpx serve {shlex.quote(str(shown))}" if result.state == "proven" else text


def _answers(result: BuildResult) -> list[str]:
    """What the served model answered to the recipe's prompts."""
    checks = result.manifest.data["evidence"].get("smoke", {}).get("report", {}).get("checks", [])
    details = {check["name"]: check["detail"] for check in checks}
    lines = []
    for number, prompt in enumerate(result.manifest.data["recipe"]["smoke"]["prompts"], 1):
        if (detail := details.get(f"prompt {number}")) is not None:
            asked = prompt["text"] or prompt["messages"][-1]["content"]
            lines.append(f"{asked!r} -> {detail}")
    return lines


def _row(entry: Entry) -> dict[str, object]:
    return {
        "stage": entry.stage,
        "key": entry.key,
        "bytes": entry.size,
        "unused_seconds": round(entry.age),
        "made_at": entry.made_at,
        "shown_by": list(entry.used_by),
        "complete": entry.complete,
    }


def _described(entry: Entry) -> str:
    shown = f", shown by {', '.join(entry.used_by)}" if entry.used_by else ""
    return f"{entry.stage} {entry.key[:12]} ({mb(entry.size)}, last used {_age(entry.age)}{shown})"


def _age(seconds: float) -> str:
    for unit, length in (("days", DAY), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"
