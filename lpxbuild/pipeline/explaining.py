"""`build --why`: which stages would run, and which of their inputs moved; nothing is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.output import Output
from lpxbuild.pipeline import evidence, host, locking, refusals, source_input
from lpxbuild.pipeline.artifact import Artifact
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import RememberedDigests
from lpxbuild.pipeline.keys import changes, components, inputs_of, key_of
from lpxbuild.pipeline.manifest import differences
from lpxbuild.pipeline.source_input import SourceInput
from lpxbuild.pipeline.stages import Stage, stages_to
from lpxbuild.pipeline.workspace import Workspace

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe


CHECKED = ("calibration", "checkpoint", "engine")
"""Stages before which a build looks at the model."""


@dataclass(frozen=True)
class StagePlan:
    """What a build would do with one stage, and why: one line per reason."""

    stage: str
    runs: bool
    reasons: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "runs": self.runs, "reasons": list(self.reasons)}


@dataclass(frozen=True)
class Explanation:
    """The plan of all stages, and what in the build folder is not as it was built."""

    stages: tuple[StagePlan, ...]
    build_folder: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"stages": [plan.as_dict() for plan in self.stages], "build_folder": list(self.build_folder)}

    def text(self) -> str:
        """For people: one line per stage, its reasons below."""
        lines = []
        for plan in self.stages:
            lines.append(f"{plan.stage}: {'runs' if plan.runs else 'up to date'}")
            lines += [f"  {reason}" for reason in plan.reasons]
        lines += [f"build folder: {line}" for line in self.build_folder]
        return "\n".join(lines)


def why(
    recipe: Recipe,
    *,
    to: str | None = None,
    force: bool = False,
    recipe_path: Path | None = None,
    cache_dir: Path | None = None,
    build_dir: Path = Path("build"),
    output: Output | None = None,
) -> Explanation:
    """Explain what `build` with these arguments would run.

    Local sources that were never built are hashed for the answer; nothing is downloaded and nothing written.

    Raises:
        RecipeError, SourceError: the build would be refused, as far as the recipe and config.json say.
    """
    output = output if output is not None else Output.quiet()
    base = (recipe_path.parent if recipe_path is not None else Path()).absolute()
    stages = stages_to(to, recipe, base)
    host.check_recipe(recipe, tuple(stage.name for stage in stages))
    cache = Cache(cache_dir)
    workspace = Workspace(build_dir / recipe.name, cache, output)
    lock_path = locking.place(recipe_path, workspace.root)
    pinned = locking.read_for(lock_path, recipe, required=False)
    given = source_input.resolve(recipe.model.source, locking.revision(recipe, pinned), base=base)
    files = _files(given, cache)
    old = workspace.manifest()
    before: Mapping[str, Any] = old.stages if old is not None else {}
    plans: list[StagePlan] = []
    artifacts: dict[str, Artifact] = {}
    commit = (given.revision or "") if given.kind == "hub" else ""
    for stage in stages:
        if stage.name == "source" and given.kind != "gguf":
            absent = files is None
            plans.append(StagePlan("source", absent, (f"{given.origin} is not on this host yet",) if absent else ()))
            continue
        running = {plan.stage for plan in plans if plan.runs} - artifacts.keys()
        missing = [name for name in stage.reads if name in running]
        if missing or (stage.name == "source" and files is None):
            plans.append(StagePlan(stage.name, True, tuple(f"{name} runs" for name in missing)))
            continue
        digests = {name: artifact.digest for name, artifact in artifacts.items()}
        inputs = inputs_of(stage.name, stage.reads, files=files or {}, commit=commit, digests=digests)
        inputs |= stage.inputs(recipe, base)
        wanted = components(recipe, fields=stage.fields, versions=stage.versions, rooms=stage.rooms, inputs=inputs)
        plan, artifact = _plan(stage, wanted, cache, before.get(stage.name), force=force)
        if not plan.runs and stage.name in evidence.refuted(old, cache):
            plan = StagePlan(stage.name, True, (f"a later {stage.name} of the same files failed",))
        plans.append(plan)
        if artifact is not None:
            artifacts[stage.name] = artifact
    folder = _folder(given, cache)
    if folder is not None and folder.is_dir() and any(plan.runs and plan.stage in CHECKED for plan in plans):
        refusals.check_from_config(recipe, stages, folder)
    found = differences(workspace.root, old) if old is not None else []
    return Explanation(tuple(plans), tuple(found))


def _folder(given: SourceInput, cache: Cache) -> Path | None:
    return source_input.snapshot(given, cache.digests) if given.kind == "hub" else given.path


def _files(given: SourceInput, cache: Cache) -> dict[str, str] | None:
    folder = _folder(given, cache)
    if folder is None or not folder.exists():
        return None
    return source_input.digests(folder, RememberedDigests(cache.digests), fresh=False, save=False)


def _plan(
    stage: Stage, wanted: Mapping[str, str], cache: Cache, before: Mapping[str, Any] | None, *, force: bool
) -> tuple[StagePlan, Artifact | None]:
    artifact = cache.find(stage.name, key_of(stage.name, wanted))
    moved = changes(before["inputs"], wanted) if before is not None else []
    if artifact is None:
        reasons = moved or [f"the cache at {cache.root} does not have it"]
        return StagePlan(stage.name, True, tuple(reasons)), None
    problems, _refreshed = artifact.problems(full=False)
    if problems:
        return StagePlan(stage.name, True, tuple(f"damaged in the cache: {line}" for line in problems)), None
    if force:
        return StagePlan(stage.name, True, ("--force",)), artifact
    return StagePlan(stage.name, False, tuple(f"{line} (made before, in the cache)" for line in moved)), artifact
