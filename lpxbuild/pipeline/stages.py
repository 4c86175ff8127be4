"""The stages, one entry each: what it reads, what shapes its output, what it calls.

source → calibration → checkpoint → engine → repository → verify → smoke. A local folder or a hub snapshot is its own
source artifact and is used in place; a `.gguf` becomes a real Hugging Face folder in a `source` artifact. Calibration
is a stage of recipes whose format needs it, verify of those whose host can run it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline.outcomes import EvidenceFailed

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe
    from lpxbuild.source import Source


@dataclass
class Work:
    """What a stage function is given.

    Attributes:
        recipe: the recipe.
        origin: what the recipe calls the source.
        paths: finished artifact folders by stage; `source` is the Hugging Face folder.
        source: checks the source folder (once) and returns it.
        gguf: the `.gguf` file that the source stage converts, if there is one.
        base: folder that relative paths of the recipe start from.
        logs: folder for logs of external processes.
        cache: root of the cache.
        output: for progress and notices.
    """

    recipe: Recipe
    origin: str
    paths: Mapping[str, Path]
    source: Callable[[], Source]
    gguf: Path | None
    base: Path
    logs: Path
    cache: Path
    output: Output


def _always(_recipe: Recipe, _base: Path) -> bool:
    return True


def _nothing(_recipe: Recipe, _base: Path) -> dict[str, str]:
    return {}


def _by_nobody(_work: Work) -> str | None:
    return None


@dataclass(frozen=True)
class Stage:
    """One row of the registry.

    Attributes:
        run: (work, empty destination folder) → report, as JSON-able data.
        fields: recipe fields that shape the output.
        versions: distributions that shape the output.
        rooms: code that shapes the output (folders of lpxbuild, or `model_repo`).
        reads: the stages whose artifacts it reads, the one before it last.
        hash_input: hash that artifact in full before a run.
        applies: (recipe, its folder) → whether a build of it has this stage.
        inputs: (recipe, its folder) → what else the output depends on, by name.
        left_out: why this host cannot run it, where the recipe leaves that open; None = it can.
        evidence: it makes a verdict, not a part of the build.
    """

    name: str
    run: Callable[[Work, Path], dict[str, Any]]
    fields: tuple[str, ...]
    versions: tuple[str, ...] = ()
    rooms: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    hash_input: bool = False
    applies: Callable[[Recipe, Path], bool] = _always
    inputs: Callable[[Recipe, Path], dict[str, str]] = _nothing
    left_out: Callable[[Work], str | None] = _by_nobody
    evidence: bool = False


def _convert_source(work: Work, destination: Path) -> dict[str, Any]:
    from lpxbuild import source

    assert work.gguf is not None
    source.fetch(str(work.gguf), None, destination=destination, dtype=work.recipe.model.dtype, output=work.output)
    return {"converted": work.gguf.name}


def reference_python(recipe: Recipe, base: Path) -> Path | None:
    """The interpreter of `runtime.reference_python`; None = lpx's own."""
    if recipe.runtime.reference_python is None:
        return None
    path = Path(recipe.runtime.reference_python).expanduser()
    return path if path.is_absolute() else base / path


def _compile_engine(work: Work, destination: Path) -> dict[str, Any]:
    from lpxbuild import engine

    recipe = work.recipe
    report = engine.compile_engine(
        recipe.backend,
        work.paths["checkpoint"],
        destination,
        limits=recipe.limits,
        runtime=recipe.runtime,
        output=work.output,
    )
    return plain(report)


def _render_repository(work: Work, destination: Path) -> dict[str, Any]:
    from lpxbuild import repository

    recipe = work.recipe
    settings = repository.RepositorySettings(
        backend=recipe.backend,
        max_batch_size=recipe.limits.max_batch_size,
        max_beam_width=recipe.limits.max_beam_width,
        decoupled=recipe.serve.streaming,
        max_queue_delay_microseconds=recipe.serve.max_queue_delay_microseconds,
        max_queue_size=recipe.limits.max_queue_size,
        preprocessing_instances=recipe.serve.instances.preprocessing,
        postprocessing_instances=recipe.serve.instances.postprocessing,
        tensorrt_llm_instances=recipe.serve.instances.tensorrt_llm,
        bls_instances=recipe.serve.instances.tensorrt_llm_bls,
        engine_python=recipe.runtime.python or "",
        bls=recipe.serve.bls,
        add_special_tokens=recipe.serve.add_special_tokens,
        skip_special_tokens=recipe.serve.skip_special_tokens,
    )
    report = repository.render(work.paths["engine"], destination, settings, output=work.output)
    return {"models": list(report.models), "shared_bytes": report.shared_bytes}


def _smoke(work: Work, destination: Path) -> dict[str, Any]:
    from lpxbuild import server, smoke

    recipe = work.recipe
    settings = server.ServerSettings(
        drain_seconds=recipe.serve.drain_seconds, warmup_prompts=recipe.serve.warmup.prompts
    )
    repository = work.paths["repository"]
    log = work.logs / "smoke-server.log"
    with server.start(repository, log_path=log, settings=settings, cache=work.cache, output=work.output) as running:
        report = smoke.run(
            smoke.Endpoints(running.http_url, running.grpc_url, running.runtime.folder),
            repository=repository,
            prompts=[prompt.model_dump(mode="json") for prompt in recipe.smoke.prompts],
            output=work.output,
        )
    evidence = report.as_dict()
    files = {
        "smoke.json": json.dumps(evidence, indent=1, ensure_ascii=False) + "\n",
        "smoke.xml": report.junit(),
    }
    work.output.step(f"smoke: {report.summary()}")
    if not report.ok:
        raise EvidenceFailed(
            f"the smoke test failed: {', '.join(check.name for check in report.failed) or 'nothing passed'}",
            stage="smoke",
            why="\n".join(f"{check.name}: {check.detail}" for check in report.failed),
            next=f"read {log}; the build stays usable as `built, not proven`",
            evidence=evidence,
            files=files,
        )
    for name, text in files.items():
        (destination / name).write_text(text, encoding="utf-8")
    return evidence


def plain(report: Any) -> dict[str, Any]:
    """A report as JSON-able data, without paths."""
    data: dict[str, Any] = asdict(report) if is_dataclass(report) and not isinstance(report, type) else dict(report)
    return {name: value for name, value in data.items() if not isinstance(value, Path)}


def _lazily(module: str, function: str) -> Callable[..., Any]:
    """A function of a module of this package that needs this one."""

    def call(*arguments: Any) -> Any:
        return getattr(import_module(f"lpxbuild.pipeline.{module}"), function)(*arguments)

    return call


STAGES: tuple[Stage, ...] = (
    Stage(
        "source",
        _convert_source,
        fields=("model.dtype",),
        versions=("gguf", "tokenizers"),
        rooms=("source",),
    ),
    Stage(
        "calibration",
        _lazily("calibrating", "run_stage"),
        # Not `exclude`: what was seen in a layer that stays unquantized is simply not used.
        fields=(
            "quantization.format",
            "quantization.kv_cache",
            "quantization.group_size",
            "quantization.overrides",
            "quantization.calibration",
        ),
        versions=("tokenizers",),
        rooms=("families", "quantization"),
        reads=("source",),
        applies=_lazily("calibrating", "applies"),
        inputs=_lazily("calibrating", "inputs"),
        left_out=_lazily("calibrating", "left_out"),
    ),
    Stage(
        "checkpoint",
        _lazily("converting", "run_stage"),
        fields=(
            "checkpoint_layout",
            "model.source",
            "model.dtype",
            "quantization.format",
            "quantization.kv_cache",
            "quantization.group_size",
            "quantization.exclude",
            "quantization.overrides",
            "parallel.tensor",
            "parallel.pipeline",
        ),
        rooms=("families", "quantization", "source", "checkpoint"),
        reads=("source", "calibration"),
        inputs=_lazily("converting", "inputs"),
    ),
    Stage(
        "engine",
        _compile_engine,
        fields=(
            "backend",
            "limits.max_batch_size",
            "limits.max_input_len",
            "limits.max_seq_len",
            "limits.max_num_tokens",
            "limits.max_beam_width",
            "runtime.precision",
            "runtime.threads",
            "runtime.kv_cache_gib",
            "runtime.enable_kv_cache_reuse",
            "runtime.enable_chunked_context",
        ),
        versions=("openvino",),
        rooms=("families", "quantization", "checkpoint", "engine"),
        reads=("checkpoint",),
        hash_input=True,
    ),
    Stage(
        "repository",
        _render_repository,
        fields=(
            "backend",
            "limits.max_batch_size",
            "limits.max_beam_width",
            "limits.max_queue_size",
            "runtime.python",
            "serve.streaming",
            "serve.bls",
            "serve.add_special_tokens",
            "serve.skip_special_tokens",
            "serve.max_queue_delay_microseconds",
            "serve.instances",
        ),
        versions=("python",),
        rooms=("repository", "model_repo"),
        reads=("engine",),
    ),
    Stage(
        "verify",
        _lazily("verifying", "run_stage"),
        # max_seq_len cuts the texts; sums are ordered by the threads.
        fields=(
            "checkpoint_layout",
            "backend",
            "limits.max_seq_len",
            "runtime.threads",
            "verify.text",
            "verify.tokens",
            "verify.prompts",
            "verify.warn",
            "verify.fail",
        ),
        versions=("openvino", "tokenizers"),
        rooms=("families", "quantization", "source", "checkpoint", "engine", "recipe", "verify"),
        reads=("source", "checkpoint", "engine"),
        applies=_lazily("verifying", "applies"),
        inputs=_lazily("verifying", "inputs"),
        left_out=_lazily("verifying", "left_out"),
        evidence=True,
    ),
    Stage(
        "smoke",
        _smoke,
        fields=("smoke", "serve.warmup", "serve.drain_seconds"),
        versions=("openvino", "openvino-genai", "nvidia-pytriton", "tokenizers", "tritonclient"),
        rooms=("server", "smoke", "model_repo"),
        reads=("repository",),
        evidence=True,
    ),
)

NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)

TARGETS: tuple[str, ...] = tuple(stage.name for stage in STAGES if not stage.evidence)
"""What `--to` takes."""

SHOWN: tuple[str, ...] = ("checkpoint", "engine", "repository")
"""Stages whose artifact appears as a folder of the build."""


def stages_to(target: str | None, recipe: Recipe, base: Path) -> tuple[Stage, ...]:
    """The stages of a build of this recipe that stops after `target` (None: after the evidence).

    Args:
        base: folder that relative paths of the recipe start from.

    Raises:
        UsageError: no such stage.
    """
    stages = tuple(stage for stage in STAGES if stage.applies(recipe, base))
    if target is None:
        return stages
    if target not in TARGETS:
        raise UsageError(
            f"--to {target}: no such stage",
            why=f"the stages are {', '.join(TARGETS)}; without --to the build goes on to the smoke test",
            next="lpx build RECIPE --to checkpoint",
        )
    if target not in (stage.name for stage in stages):
        raise UsageError(
            f"--to {target}: a build of {recipe.name} has no such stage",
            why=f"its stages are {', '.join(stage.name for stage in stages if not stage.evidence)}; nothing of "
            f"quantization.format {recipe.quantization.format} and kv_cache {recipe.quantization.kv_cache} is measured",
            next="lpx build RECIPE --to checkpoint",
        )
    last = NAMES.index(target)
    return tuple(stage for stage in stages if NAMES.index(stage.name) <= last)
