"""`build`: every stage up to the smoke test, each only when something it depends on has changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import LpxError
from lpxbuild.output import Output
from lpxbuild.pipeline import evidence as evidences
from lpxbuild.pipeline import host, locking, refusals, source_input
from lpxbuild.pipeline.artifact import Artifact
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import RememberedDigests, combined
from lpxbuild.pipeline.keys import components, inputs_of, key_of, version
from lpxbuild.pipeline.making import Maker
from lpxbuild.pipeline.manifest import Manifest
from lpxbuild.pipeline.outcomes import EvidenceFailed, EvidenceMissing
from lpxbuild.pipeline.placing import room_errors
from lpxbuild.pipeline.source_input import SourceInput, recipe_text
from lpxbuild.pipeline.stages import NAMES, STAGES, Stage, Work, stages_to
from lpxbuild.pipeline.workspace import LOGS, Workspace

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe
    from lpxbuild.source import Source


@dataclass(frozen=True)
class BuildResult:
    """What a build ended with.

    Attributes:
        path: the build folder.
        manifest: its manifest.
        state: "built to STAGE", "built, not proven" or "proven".
        made: stages that ran; the others were taken from the cache.
    """

    path: Path
    manifest: Manifest
    state: str
    made: tuple[str, ...]


def build(
    recipe: Recipe,
    *,
    to: str | None = None,
    force: bool = False,
    locked: bool = False,
    paranoid: bool = False,
    backend: str | None = None,
    recipe_path: Path | None = None,
    cache_dir: Path | None = None,
    build_dir: Path = Path("build"),
    output: Output | None = None,
) -> BuildResult:
    """Build a recipe.

    Args:
        to: stop after this stage; None goes on to the smoke test.
        force: run every stage again.
        locked: refuse any drift from the recipe's lock file.
        paranoid: hash sources, cached artifacts and the build folder in full.
        backend: used in place of the recipe's.
        recipe_path: the recipe's file; relative sources and the lock file start from its folder.
        cache_dir: default `$LPX_CACHE`, else `~/.cache/lpx`.
        build_dir: the build is shown at `build_dir/NAME`.

    Raises:
        RecipeError, SourceError, UsageError: refused, before anything is downloaded where that can be known.
        HostError: package, memory or disk missing.
        VerdictError: built, and the smoke test failed.
    """
    if backend is not None and backend != recipe.backend:
        recipe = type(recipe).model_validate(recipe.model_dump(exclude_unset=True) | {"backend": backend})
    run = _Build(
        recipe,
        to,
        Cache(cache_dir),
        build_dir,
        recipe_path=recipe_path,
        output=output if output is not None else Output.quiet(),
        force=force,
        paranoid=paranoid,
    )
    return run.run(locked=locked)


class _Build:
    """One run of `build`."""

    def __init__(
        self,
        recipe: Recipe,
        to: str | None,
        cache: Cache,
        build_dir: Path,
        *,
        recipe_path: Path | None,
        output: Output,
        force: bool,
        paranoid: bool,
    ) -> None:
        self.recipe = recipe
        self.base = (recipe_path.parent if recipe_path is not None else Path()).absolute()
        self.stages = stages_to(to, recipe, self.base)
        self.cache = cache
        self.output = output
        self.paranoid = paranoid
        self.workspace = Workspace(build_dir / recipe.name, cache, output)
        self.recipe_path = recipe_path
        self.lock_path = locking.place(recipe_path, self.workspace.root)
        self.remembered = RememberedDigests(cache.digests)
        self.maker = Maker(
            cache,
            output,
            self._before_making,
            self._after_running,
            self._room_for,
            force=force,
            paranoid=paranoid,
        )
        self.artifacts: dict[str, Artifact] = {}
        self.paths: dict[str, Path] = {}
        self.commit: str | None = None
        self.files: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._source: Source | None = None
        self._checked = False

    def run(self, *, locked: bool) -> BuildResult:
        names = tuple(stage.name for stage in self.stages)
        host.check_recipe(self.recipe, names)
        pinned = locking.read_for(self.lock_path, self.recipe, required=locked)
        self.input = source_input.resolve(
            self.recipe.model.source, locking.revision(self.recipe, pinned), base=self.base
        )
        host.check_packages(self.recipe, names, gguf=self.input.kind == "gguf")
        versions = self._versions()
        if locked and pinned is not None:
            locking.refuse_drift(self.lock_path, pinned.version_drift(versions))
        with ExitStack() as stack:
            stack.callback(self.maker.close)
            stack.enter_context(room_errors(self.workspace.root))
            stack.enter_context(room_errors(self.cache.root))
            self.cache.sweep(output=self.output)
            evidences.forget_refuted(self.workspace.manifest(), self.cache, output=self.output)
            self._fetch_source()
            lock = locking.renewed(pinned, self.recipe, self.commit, self.files, versions)
            if locked and pinned is not None:
                locking.refuse_drift(self.lock_path, pinned.drift(lock))
            failure = self._run_stages()
            if not locked:
                locking.save(self.lock_path, lock, self.output)
            self._carry_over()
            result = self._finish(versions, failure)
            if failure is not None:
                failure.details = {"path": str(result.path), "state": result.state, "report": failure.evidence}
                raise failure
            return result

    # source -----------------------------------------------------------------------------------------------------

    def _fetch_source(self) -> None:
        """The Hugging Face folder of the source, and digests of everything in it."""
        given = self.input
        if given.kind == "gguf":
            self.files = source_input.digests(given.path, self.remembered, fresh=self.paranoid, output=self.output)
            artifact = self._obtain(STAGES[0])
            self.paths["source"] = artifact.path
            return
        folder = source_input.snapshot(given, self.cache.digests) if given.kind == "hub" else given.path
        if folder is None:
            from lpxbuild.source import check_config, fetch

            accept = partial(check_config, **self._use())
            folder = fetch(given.location, given.revision, accept=accept, output=self.output)
            source_input.remember_snapshot(given, folder, self.cache.digests)
        elif given.kind == "folder" and self.recipe.model.revision is not None:
            self.output.notice(f"model.revision {self.recipe.model.revision} has no meaning for a local source")
        self.paths["source"] = folder
        self.commit = source_input.commit_of(folder) if given.kind == "hub" else None
        self.files = source_input.digests(
            folder,
            self.remembered,
            fresh=self.paranoid,
            before_reading=lambda: self._before_making(self.stages[1] if self.stages[1:] else STAGES[0]),
            output=self.output,
        )
        if self.stages[-1].name == "source":
            self._checked_source()

    def _use(self) -> dict[str, Any]:
        """What the source is for, as its checks ask."""
        from lpxbuild.quantization.scheme import Scheme

        return {
            "tensor_parallel": self.recipe.parallel.tensor,
            "pipeline_parallel": self.recipe.parallel.pipeline,
            "layout": self.recipe.checkpoint_layout if self._has("checkpoint") else None,
            "scheme": Scheme.of(self.recipe.quantization),
            "backend": self.recipe.backend,
        }

    def _checked_source(self) -> Source:
        if self._source is None:
            from lpxbuild.source import check, is_quantized

            calibrated = self._has("calibration") and not is_quantized(self.paths["source"])
            self._source = check(
                self.paths["source"],
                origin=self.input.origin,
                revision=self.commit,
                need_tokenizer=self.stages[-1].name not in ("source", "checkpoint") or calibrated,
                **self._use(),
                output=self.output,
            )
        return self._source

    # checks -----------------------------------------------------------------------------------------------------

    def _before_making(self, stage: Stage) -> None:
        """Everything that can be refused without reading a weight; once, before the first stage that runs."""
        if self._checked or stage.name == "source":
            return
        self._checked = True
        refusals.check(
            self.recipe,
            self.stages,
            stage,
            source=self._checked_source,
            folder=self.paths["source"],
            base=self.base,
            cache=self.cache.root,
        )

    def _has(self, name: str) -> bool:
        return any(stage.name == name for stage in self.stages)

    def _after_running(self, stage: Stage) -> tuple[str, ...]:
        """The key says which bytes were read: refuse what was made of files that changed meanwhile.

        Returns:
            Notices of the source's check, which came before the stage and belong to its result.
        """
        gguf = self.input.kind == "gguf"
        if stage.name == "source" or ("source" in stage.reads and not gguf):
            place = self.input.path if gguf else self.paths["source"]
            source_input.refuse_changed(place, self.files, self.remembered, origin=self.input.origin)
        return self._source.notices if stage.name == "checkpoint" and self._source is not None else ()

    def _room_for(self, stage: Stage) -> int:
        """Bytes that the stage's output has at least; the converter knows its own need and checks it itself."""
        if stage.name == "source":
            return self.input.path.stat().st_size
        return self.artifacts["checkpoint"].size // 4 if stage.name == "engine" else 0

    # stages -----------------------------------------------------------------------------------------------------

    def components(self, stage: Stage) -> dict[str, str]:
        """The components of a stage's key; the artifact before it must be there."""
        digests = {name: artifact.digest for name, artifact in self.artifacts.items()}
        inputs = inputs_of(stage.name, stage.reads, files=self.files, commit=self.commit or "", digests=digests)
        inputs |= stage.inputs(self.recipe, self.base)
        return components(self.recipe, fields=stage.fields, versions=stage.versions, rooms=stage.rooms, inputs=inputs)

    def _obtain(self, stage: Stage) -> Artifact:
        wanted = self.components(stage)
        if stage.hash_input and stage.reads[-1] in self.artifacts and self._has_to_run(stage, wanted):
            before = STAGES[NAMES.index(stage.reads[-1])]
            self.artifacts[before.name] = self.maker.obtain(before, self.components(before), self._work(), full=True)
            self.paths[before.name] = self.artifacts[before.name].path
            wanted = self.components(stage)
        artifact = self.maker.obtain(stage, wanted, self._work())
        if stage.name in self.maker.made:
            # A stage may have made links of its input's files, which moves their ctime.
            for name, earlier in self.artifacts.items():
                fresh = earlier.with_current_times()
                if fresh is not earlier:
                    fresh.save()
                    self.artifacts[name] = fresh
        self.artifacts[stage.name] = artifact
        self.paths[stage.name] = artifact.path
        return artifact

    def _has_to_run(self, stage: Stage, wanted: Mapping[str, str]) -> bool:
        return self.maker.force or self.maker.cached(stage, wanted) is None

    def _work(self) -> Work:
        return Work(
            recipe=self.recipe,
            origin=self.input.origin,
            paths=self.paths,
            source=self._checked_source,
            gguf=self.input.path if self.input.kind == "gguf" else None,
            base=self.base,
            logs=self.workspace.root / LOGS,
            cache=self.cache.root,
            output=self.output,
        )

    def _run_stages(self) -> EvidenceFailed | None:
        for stage in self.stages[1:]:
            if self._left_out(stage):
                continue
            try:
                self._obtain(stage)
            except EvidenceFailed as failure:
                return failure
            except EvidenceMissing as missing:
                self._leave_out(stage, missing.what)
            except LpxError:
                if self.workspace.manifest() is not None:
                    self.output.step(f"{stage.name}: failed; {self.workspace.root} keeps the earlier result")
                raise
        return None

    def _left_out(self, stage: Stage) -> bool:
        """Whether the stage cannot run here and is not in the cache either; evidence that is left out is said."""
        reason = stage.left_out(self._work())
        if reason is None or not self._has_to_run(stage, self.components(stage)):
            return False
        self._leave_out(stage, reason)
        return True

    def _leave_out(self, stage: Stage, reason: str) -> None:
        self.left_out[stage.name] = reason
        if stage.evidence:
            self.output.notice(f"{stage.name} was left out: {reason}")

    def _carry_over(self) -> None:
        """Later stages of an earlier build stay in the view when nothing they depend on has moved."""
        old = self.workspace.manifest()
        if old is None or self._has("smoke"):
            return
        whole = stages_to(None, self.recipe, self.base)
        names = {stage.name for stage in whole} - {"source"}
        for stage in whole[len(self.stages) :]:
            if any(name in names and name not in self.artifacts for name in stage.reads):
                return
            if (reason := old.data["evidence"].get("left_out", {}).get(stage.name)) is not None:
                self.left_out[stage.name] = reason
                continue
            wanted = self.components(stage)
            if old.stages.get(stage.name, {}).get("key") != key_of(stage.name, wanted):
                return
            artifact = self.maker.cached(stage, wanted) or self.workspace.shown(old, stage.name, full=self.paranoid)
            if artifact is None:
                if stage.evidence:
                    self.output.notice(
                        f"the cache does not have the evidence `{stage.name}` of {self.workspace.root} any more: "
                        "lpx build without --to runs it again"
                    )
                return
            self.artifacts[stage.name] = artifact

    # result -----------------------------------------------------------------------------------------------------

    def _versions(self) -> dict[str, str]:
        stages = self.stages if self.input.kind == "gguf" else self.stages[1:]
        found = {name: version(name) for stage in stages for name in ("lpx", *stage.versions)}
        for stage in stages:
            given = stage.inputs(self.recipe, self.base)
            found |= {f"{name} ({stage.name})": value for name, value in given.items()}
        return dict(sorted(found.items()))

    def _finish(self, versions: Mapping[str, str], failure: EvidenceFailed | None) -> BuildResult:
        evidence, files = evidences.collected(self.artifacts, failure, self.left_out, self.workspace)
        texts = {"recipe.yaml": recipe_text(self.recipe, self.recipe_path), **files}
        state = evidences.state_of(self.artifacts, evidence, failure, verify_required=self.recipe.verify.required)
        if "repository" in self.artifacts:
            evidence["repository"] = self.artifacts["repository"].digest
        data = {
            "name": self.recipe.name,
            "state": state,
            "backend": self.recipe.backend,
            "recipe": self.recipe.model_dump(mode="json"),
            "inputs": {
                "source": self.input.origin,
                "kind": self.input.kind,
                "commit": self.commit,
                "files": self.files,
                "digest": combined(self.files),
            },
            "stages": {name: artifact.described_briefly() for name, artifact in self.artifacts.items()},
            "versions": dict(versions),
            "notices": sorted({notice for artifact in self.artifacts.values() for notice in artifact.notices}),
            "evidence": evidence,
        }
        result = self.workspace.update(self.artifacts, texts, data, full=self.paranoid)
        return BuildResult(self.workspace.root, result, result.state, tuple(n for n in NAMES if n in self.maker.made))


__all__ = ["BuildResult", "SourceInput", "build"]
