"""The stage `verify` of a build, and what `lpx verify` calls: a build compared with its source."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import HostError, SourceError, UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline import source_input
from lpxbuild.pipeline.cache import Cache
from lpxbuild.pipeline.digest import RememberedDigests, record_file, sha256_file
from lpxbuild.pipeline.manifest import NOT_PROVEN, TEXTS, Manifest
from lpxbuild.pipeline.outcomes import EvidenceFailed, EvidenceMissing
from lpxbuild.pipeline.placing import write_atomically
from lpxbuild.pipeline.stages import Work, reference_python
from lpxbuild.pipeline.workspace import LOGS, Workspace

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe
    from lpxbuild.verify import Verdict, VerifyInput

LOG = "verify.log"


def applies(recipe: Recipe, base: Path) -> bool:
    """Whether a build of this recipe compares itself with its source: `verify.run`, and what is installed."""
    if recipe.verify.run == "never" or _demanded(recipe):
        return recipe.verify.run != "never"
    from lpxbuild.verify import checks

    return checks.missing_packages(reference_python(recipe, base)) is None and (
        recipe.checkpoint_layout == "unified_hf" or checks.no_engine() is None
    )


def inputs(recipe: Recipe, base: Path) -> dict[str, str]:
    """The text, and the versions of the reference."""
    from lpxbuild.quantization.calibration.interpreter import versions
    from lpxbuild.verify.texts import BUILTIN

    found = versions(reference_python(recipe, base))
    given = {f"reference {name}": found[name] or "absent" for name in ("torch", "transformers")}
    path = base / recipe.verify.text
    if recipe.verify.text != BUILTIN and path.is_file():
        given["text"] = sha256_file(path)
    return given


def left_out(work: Work) -> str | None:
    """Why the comparison does not run here; a recipe that demands it was refused before."""
    from lpxbuild.verify import cannot_run

    python = reference_python(work.recipe, work.base)
    return cannot_run(work.paths["source"], python=python, embedded=_embedded(work.recipe))


def check(recipe: Recipe, folder: Path, base: Path) -> None:
    """Refuse a build that must compare itself (`verify.run: always`) and cannot, before anything is converted.

    Raises:
        SourceError: there is no such text.
        HostError: names what is missing.
    """
    from lpxbuild.verify import cannot_run
    from lpxbuild.verify.texts import check_text

    check_text(recipe.verify.text, base)
    if not _demanded(recipe):
        return
    reason = cannot_run(folder, python=reference_python(recipe, base), embedded=_embedded(recipe))
    if reason is not None:
        raise HostError(
            f"verify cannot run here: {reason}",
            why="the recipe demands it (verify.run: always, or verify.required)",
            next="pip install 'lpxbuild[verify]', or set runtime.reference_python, or verify.run: auto",
        )


def run_stage(work: Work, destination: Path) -> dict[str, Any]:
    """The stage.

    Raises:
        EvidenceFailed: the verdict is negative, or there is none and the recipe demands one.
        EvidenceMissing: there was nothing to compare with after all.
    """
    from lpxbuild.verify import run

    recipe = work.recipe
    python = reference_python(recipe, work.base)
    log = work.logs / LOG
    engine = work.paths.get("engine") if recipe.backend == "openvino" else None
    built = _input(recipe, work.paths["source"], work.paths["checkpoint"], engine)
    verdict = run(built, recipe.verify, base=work.base, python=python, log=log, output=work.output)
    work.output.step(verdict.summary())
    # Without the recipe's name, which is no part of the stage's key.
    files = reports(verdict, "lpx verify")
    compared = verdict.status != "self-consistent"
    if not compared and not _demanded(recipe):
        raise EvidenceMissing(verdict.reasons[0], next="lpx build RECIPE   tries again")
    if not verdict.ok:
        raise EvidenceFailed(
            _failure(recipe.name, verdict) if compared else f"{recipe.name} was not compared with its source",
            stage="verify",
            why="\n".join(verdict.reasons[:5]),
            next="open evidence/verify.html in the build folder; the build stays usable as `built, not proven`",
            evidence=verdict.as_dict(),
            files=files,
        )
    for reason in verdict.reasons:
        work.output.notice(f"verify: {reason}")
    for name, text in files.items():
        (destination / name).write_text(text, encoding="utf-8")
    return verdict.as_dict()


def reports(verdict: Verdict, title: str) -> dict[str, str]:
    """The files of the evidence folder."""
    from lpxbuild.verify.report import as_html, as_json

    return {"verify.json": as_json(verdict), "verify.html": as_html(verdict, title)}


def verify(
    build: Path,
    *,
    recipe_path: Path | None,
    html: Path | None,
    cache_dir: Path | None = None,
    output: Output,
) -> None:
    """Compare a build folder with its source and note the verdict in its manifest.

    Args:
        recipe_path: where the build's recipe lies, if its relative paths do not start from the working folder.
        html: also write the page there.
        cache_dir: default as of `lpx build`.

    Raises:
        VerifyFailed: the verdict is negative, or there was nothing to compare with.
        UsageError, SourceError: no build, a changed one, or its source is not there.
    """
    from lpxbuild.recipe import Recipe
    from lpxbuild.verify import VerifyFailed, run
    from lpxbuild.verify.report import as_text

    manifest = manifests.read(build)
    recipe = Recipe.model_validate_json(_json(manifest.data["recipe"]))
    cache = Cache(cache_dir)
    _check_unchanged(build, manifest)
    base = (recipe_path.parent if recipe_path is not None else Path()).absolute()
    folder = _source(manifest, cache, base, build, output)
    engine = build / "engine" if recipe.backend == "openvino" and "engine" in manifest.stages else None
    python = reference_python(recipe, base)
    log = build / LOGS / LOG
    built = _input(recipe, folder, build / "checkpoint", engine)
    verdict = run(built, recipe.verify, base=base, python=python, log=log.absolute(), output=output)
    files = reports(verdict, f"lpx verify {recipe.name}")
    if html is not None:
        try:
            html.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(html, files["verify.html"])
        except OSError as error:
            raise HostError(f"--html {html} cannot be written: {error.strerror}", next="give another file") from error
    output.result(verdict.as_dict(), as_text(verdict, output))
    if verdict.status == "self-consistent":
        raise VerifyFailed(
            f"{build} was not compared with its source: {verdict.reasons[0]}",
            why="without transformers nothing independent says that the numbers are right; this is no evidence",
            next="pip install 'lpxbuild[verify]', or name an interpreter that has it in runtime.reference_python",
        )
    note(build, manifest, verdict, files, cache, output=output)
    if verdict.status == "fail":
        raise VerifyFailed(
            _failure(str(build), verdict),
            why="\n".join(verdict.reasons[:5]),
            next=f"open {shlex.quote(str(build / 'evidence' / 'verify.html'))}",
        )


def note(
    build: Path, tested: Manifest, verdict: Verdict, files: Mapping[str, str], cache: Cache, *, output: Output
) -> None:
    """Write a verdict into the manifest; a negative one takes the proof.

    A build that changed meanwhile is left alone.
    """
    workspace = Workspace(build, cache, output)
    try:
        with workspace.locked():
            now = manifests.read(workspace.root)
            if now.data["checksum"] != tested.data["checksum"]:
                output.notice(f"{build} changed while it was compared: its manifest says nothing of this verdict")
                return
            _write(workspace.root, now, verdict, files)
    except (OSError, UsageError) as error:
        output.notice(f"{build}: its manifest still says {tested.state}; it cannot be written: {error}")
        return
    if verdict.status == "fail" and tested.state != NOT_PROVEN:
        output.notice(f"{build} was {tested.state!r}; its state is now {NOT_PROVEN!r}")


def _write(root: Path, manifest: Manifest, verdict: Verdict, files: Mapping[str, str]) -> None:
    view = {part: dict(records) for part, records in manifest.data["view"].items()}
    for name, text in files.items():
        path = root / "evidence" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        view[TEXTS][f"evidence/{name}"] = record_file(path).as_dict()
    before = manifest.data["evidence"]
    evidence = {
        **before,
        "ran": sorted({*before["ran"], "verify"}, key=["verify", "smoke"].index),
        "verify": {
            "passed": verdict.ok,
            "report": verdict.as_dict(),
            "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        },
    }
    state = manifest.state if verdict.ok else NOT_PROVEN
    # Written anew with these: the time and the checksum.
    data = {name: value for name, value in manifest.data.items() if name not in ("written_at", "checksum")}
    manifests.write(root, {**data, "state": state, "evidence": evidence, "view": view})


def _input(recipe: Recipe, source: Path, checkpoint: Path, engine: Path | None) -> VerifyInput:
    from lpxbuild.verify import VerifyInput

    return VerifyInput(
        source=source,
        checkpoint=checkpoint,
        engine=engine,
        layout=recipe.checkpoint_layout,
        max_seq_len=recipe.limits.max_seq_len,
        threads=recipe.runtime.threads,
    )


def _demanded(recipe: Recipe) -> bool:
    return recipe.verify.run == "always" or recipe.verify.required


def _embedded(recipe: Recipe) -> bool:
    return recipe.checkpoint_layout == "tensorrt_llm"


def _failure(name: str, verdict: Verdict) -> str:
    wrong = verdict.wrong
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if wrong[1:] else ""
        return f"{name} is not what its source is: {wrong[0].name}{more}"
    return f"{name} is not close enough to its source"


def _check_unchanged(build: Path, manifest: Manifest) -> None:
    if "checkpoint" not in manifest.stages:
        raise UsageError(f"{build} has no checkpoint: it is {manifest.state}", next="lpx build RECIPE")
    changed = [one for one in manifests.differences(build, manifest) if one.startswith(("checkpoint/", "engine/"))]
    if changed:
        raise UsageError(
            f"{build} is not as it was built: {changed[0]}",
            why="a verdict is about the files that the manifest records",
            next="lpx build RECIPE   puts back what was built",
        )


def _source(manifest: Manifest, cache: Cache, base: Path, build: Path, output: Output) -> Path:
    """The Hugging Face folder that was converted, with exactly the files that the manifest records."""
    inputs = manifest.data["inputs"]
    if inputs["kind"] == "gguf":
        artifact = cache.find("source", str(manifest.stages["source"]["key"]))
        if artifact is None:
            raise SourceError(
                f"the cache does not have the converted source of {build} any more",
                why=f"{inputs['source']} was converted to a Hugging Face folder, which verify compares with",
                next="lpx build RECIPE",
            )
        return artifact.path
    given = source_input.resolve(inputs["source"], inputs["commit"], base=base)
    folder: Path | None = given.path
    if given.kind == "hub":
        folder = source_input.snapshot(given, cache.digests)
        if folder is None:
            from lpxbuild.source import fetch

            folder = fetch(given.location, given.revision, output=output)
    if folder is None or not folder.is_dir():
        raise SourceError(
            f"the source of {build} is not there: {folder}",
            why=f"model.source is {inputs['source']!r}, relative to the recipe",
            next=f"lpx verify {shlex.quote(str(build))} --recipe RECIPE.yaml",
        )
    found = source_input.digests(folder, RememberedDigests(cache.digests), fresh=False)
    changed = sorted(name for name in inputs["files"].keys() | found if inputs["files"].get(name) != found.get(name))
    if changed:
        raise SourceError(
            f"{folder} is not what {build} was made of: {changed[0]} differs",
            why="a verdict compares a build with the very files that were converted",
            next="lpx build RECIPE   builds from the files as they are now",
        )
    return folder


def _json(data: Any) -> str:
    import json

    return json.dumps(data)
