"""Write a Triton model repository for an engine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from lpxbuild.errors import LpxError, UsageError
from lpxbuild.output import Output
from lpxbuild.repository.config import CONFIG_FILE, build_config, config_text
from lpxbuild.repository.files import copy_tree, model_files, read_engine
from lpxbuild.repository.parameters import problem
from lpxbuild.repository.settings import BLS_PYTHON, RepositorySettings
from lpxbuild.repository.tensors import BLS, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM
from lpxbuild.repository.validate import validate

_WITH_TOKENIZER = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING)


@dataclass(frozen=True)
class RepositoryReport:
    """What was written.

    Args:
        shared_bytes: size of the engine files that are links or reflinks, not copies.
    """

    path: Path
    models: tuple[str, ...]
    shared_bytes: int


def render(engine: Path, destination: Path, settings: RepositorySettings, *, output: Output) -> RepositoryReport:
    """Write the official layout: preprocessing, tensorrt_llm, postprocessing, ensemble and, where it can run, BLS.

    The result holds everything that it serves with, names no path outside itself, and has passed `validate`.

    Args:
        engine: a compiled engine (engine.json, the backend's files, `tokenizer/`).
        destination: a folder that is missing or empty.

    Raises:
        UsageError: the engine is damaged, does not fit the settings, has no tokenizer, or `destination` holds files.
        LpxError: the repository does not validate.
    """
    _check(engine, settings)
    if destination.exists() and any(destination.iterdir()):
        raise UsageError(
            f"{destination} is not empty",
            why="a repository is written into a folder of its own",
            next="give a new folder, or empty this one",
        )
    if settings.bls and BLS not in settings.models:
        output.notice(
            f"{BLS} is left out: the server's Python is {settings.server_python}, and Triton 2.51 crashes when a BLS "
            f"model streams on any Python but {BLS_PYTHON}; the ensemble streams exactly without it"
        )
    shared = 0
    for model in settings.models:
        version = destination / model / "1"
        version.mkdir(parents=True)
        text = config_text(build_config(model, settings))
        (destination / model / CONFIG_FILE).write_text(text, encoding="utf-8")
        if model == ENSEMBLE:
            # An ensemble has no files, but Triton wants the version folder, and copying tools drop empty ones.
            (version / ".keep").touch()
        for file in model_files(model):
            shutil.copyfile(file, version / file.name)
        if model in _WITH_TOKENIZER:
            shared += copy_tree(engine / "tokenizer", version / "tokenizer")
        if model == TENSORRT_LLM:
            shared += copy_tree(engine, version / "engine", without=frozenset({"tokenizer"}))
    findings = validate(destination)
    if findings:
        raise LpxError(
            f"the repository rendered from {engine} is not valid",
            why="\n".join(str(finding) for finding in findings),
            next="lpx cache verify, then build again with --force",
        )
    output.step(f"repository: {', '.join(settings.models)}")
    return RepositoryReport(destination, settings.models, shared)


def _check(engine: Path, settings: RepositorySettings) -> None:
    """Differences between engine and settings, before anything is written."""
    description = read_engine(engine)
    if description["backend"] != settings.backend:
        raise UsageError(
            f"the engine was compiled for backend {description['backend']}, the repository is for {settings.backend}",
            next="build the engine again: lpx build --force",
        )
    limits = description["limits"]
    assert isinstance(limits, dict)
    for name in ("max_batch_size", "max_beam_width"):
        wanted, most = getattr(settings, name), limits.get(name)
        if not isinstance(most, int) or wanted > most:
            raise UsageError(
                f"{name} is {wanted} in the repository and {most} in the engine",
                why="the server would start and fail on the first larger request",
                next=f"set limits.{name} to {most} or less, or build the engine again",
            )
    trouble = problem("program", settings.engine_python, engine)
    if trouble:
        raise UsageError(
            f"runtime.python: {trouble}", why="it runs the engine host", next="correct runtime.python in the recipe"
        )
    if not (engine / "tokenizer" / "tokenizer.json").is_file():
        raise UsageError(
            f"the engine in {engine} has no tokenizer/tokenizer.json",
            why="preprocessing and postprocessing could not load",
            next="use a source with a tokenizer.json and build again",
        )
