"""Stage functions that work in milliseconds, for tests of the pipeline itself: deterministic bytes from their inputs.

`install` puts them into the registry. `python pipeline_stages.py ARGUMENTS` runs the real command line with them;
LPX_TEST_WAIT=STAGE makes that stage say `AT STAGE` half-way through its writing and wait to be stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

LARGE = 1_200_000
"""Above the size from which files are shared by links."""

PAYLOAD = int(os.environ.get("LPX_TEST_PAYLOAD", LARGE))


def payload(seed: str, size: int = 0) -> bytes:
    """Deterministic bytes."""
    block = b"".join(hashlib.sha256(f"{seed}{n}".encode()).digest() for n in range(128))
    size = size or PAYLOAD
    return (block * (size // len(block) + 1))[:size]


def pause(stage: str) -> None:
    if os.environ.get("LPX_TEST_WAIT") == stage:
        print(f"AT {stage}", file=sys.stderr, flush=True)
        time.sleep(60)


def folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)).hexdigest()


def checkpoint(work, destination):
    recipe = work.recipe
    seed = f"{folder_digest(work.paths['source'])}{recipe.quantization.format}{recipe.model.dtype}"
    for rank in range(recipe.parallel.tensor * recipe.parallel.pipeline):
        (destination / f"rank{rank}.safetensors").write_bytes(payload(f"{seed}{rank}"))
        pause("checkpoint")
    (destination / "config.json").write_text(json.dumps({"ranks": recipe.parallel.tensor}))
    work.output.notice("stand-in: a notice of the conversion")
    return {"tensors": 3}


def engine(work, destination):
    seed = f"{folder_digest(work.paths['checkpoint'])}{work.recipe.limits.max_input_len}"
    (destination / "openvino_model.bin").write_bytes(payload(seed))
    pause("engine")
    (destination / "engine.json").write_text(json.dumps({"seed": seed}))
    return {"executor": "paged"}


def repository(work, destination):
    model = destination / "tensorrt_llm" / "1" / "engine"
    model.mkdir(parents=True)
    for path in work.paths["engine"].iterdir():
        os.link(path, model / path.name)
    pause("repository")
    streaming = str(work.recipe.serve.streaming).lower()
    (destination / "tensorrt_llm" / "config.pbtxt").write_text(f"decoupled: {streaming}\n")
    return {"models": ["tensorrt_llm"]}


def smoke(work, destination):
    from lpxbuild.pipeline.outcomes import EvidenceFailed

    pause("smoke")
    evidence = {"digest": folder_digest(work.paths["repository"])}
    text = json.dumps(evidence)
    if work.recipe.smoke.prompts[0].expect == "FAIL":
        raise EvidenceFailed(
            "the smoke test failed: prompt 1", stage="smoke", why="wrong text", next="read it", evidence=evidence,
            files={"smoke.json": text},
        )  # fmt: skip
    (destination / "smoke.json").write_text(text)
    return evidence


def verdict(status: str, reason: str = ""):
    """A verdict of `lpxbuild.verify`, without its numbers."""
    from lpxbuild.verify import Verdict

    return Verdict(status, (reason,) if reason else (), "none")


def install_verify(monkeypatch, *, left_out: str | None = None) -> list[str]:
    """A host that can compare: the recipe's first prompt is the verdict's status (any other: pass).

    Args:
        left_out: why it cannot after all.

    Returns:
        A list that gets the status of every comparison.
    """
    from lpxbuild import verify
    from lpxbuild.verify import checks

    ran: list[str] = []

    def run(built, settings, **_options):
        assert (built.source / "config.json").is_file()
        assert (built.checkpoint / "config.json").is_file()
        known = settings.prompts[0] in ("warn", "fail", "self-consistent")
        ran.append(settings.prompts[0] if known else "pass")
        return verdict(ran[-1], "stand-in: so it is" if known else "")

    monkeypatch.setattr(verify, "run", run)
    monkeypatch.setattr(verify, "cannot_run", lambda *_arguments, **_options: left_out)
    monkeypatch.setattr(checks, "missing_packages", lambda _python: None)
    monkeypatch.setattr(checks, "no_engine", lambda: None)
    return ran


def install(monkeypatch=None) -> list[str]:
    """Replace the stage functions; returns a list that names every stage that runs."""
    from lpxbuild.pipeline import building, evidence, keys, stages
    from lpxbuild.server import embedded
    from lpxbuild.verify import checks

    ran: list[str] = []

    def counted(name, function):
        def run(work, destination):
            ran.append(name)
            return function(work, destination)

        return run

    functions = {"checkpoint": checkpoint, "engine": engine, "repository": repository, "smoke": smoke}
    table = tuple(
        replace(stage, run=counted(stage.name, functions[stage.name])) if stage.name in functions else stage
        for stage in stages.STAGES
    )
    put = monkeypatch.setattr if monkeypatch is not None else setattr
    for module in (stages, building, evidence):
        put(module, "STAGES", table)
    put(embedded, "find", lambda cache=None: None)
    put(checks, "missing_packages", lambda _python: "stand-in: no torch")  # whatever this interpreter has
    put(keys, "code", lambda room: "c0de" * 10)  # these functions are not the code of those rooms
    return ran


if __name__ == "__main__":
    install()
    from lpxbuild.cli import app

    app(sys.argv[1:])
