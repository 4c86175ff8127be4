"""The two sides of a comparison: what is run for each, in a process of its own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.verify import children

if TYPE_CHECKING:
    import numpy.typing as npt

REFERENCE = Path(__file__).with_name("reference")
BOOTSTRAP = """
import importlib.util, sys
folder, job = sys.argv[1:]
spec = importlib.util.spec_from_file_location("lpx_reference", folder + "/__init__.py")
sys.modules["lpx_reference"] = importlib.util.module_from_spec(spec)
from lpx_reference.child import main
sys.exit(main(job))
"""
"""Makes a package of the folder, without anything beside it on the path."""


@dataclass(frozen=True)
class Job:
    """What both sides are asked.

    Attributes:
        sequences: token ids of the texts.
        probe: a short text whose inside is looked at.
        prompts: token ids of the prompts.
        end_ids: tokens that end an answer.
        length: longest answer, in tokens.
    """

    sequences: tuple[list[int], ...]
    probe: list[int]
    prompts: tuple[list[int], ...]
    end_ids: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class Outcome:
    """What a side left behind: `folder` has logitsN.npy, `points` is point → file and more, under `points_folder`."""

    folder: Path
    result: Mapping[str, Any]
    points_folder: Path

    def logits(self, number: int) -> npt.NDArray[Any]:
        import numpy as np

        found: npt.NDArray[Any] = np.load(self.folder / f"logits{number}.npy", mmap_mode="r")
        return found

    def point_files(self) -> dict[str, str]:
        """Absolute files of the points that can be forced."""
        return {
            point: str((self.points_folder / described["file"]).absolute())
            for point, described in self.result["points"].items()
            if point != "logits"
        }


@dataclass(frozen=True)
class Transformers:
    """A Hugging Face folder, run by transformers.

    Attributes:
        python: the interpreter.
        layerwise: no more than one layer in memory.
    """

    folder: Path
    python: Path
    threads: int
    layerwise: bool
    log: Path
    what: str

    def run(
        self, job: Job, out: Path, answers: Sequence[Sequence[int]], *, texts: bool, forced: Mapping[str, str] | None
    ) -> Outcome:
        """Args:
        answers: of the other side, for each prompt; empty ones are generated.
        texts: logits of the texts and answers.
        forced: other side's points to compute with; None looks at no point.
        """
        found = children.run(
            [str(self.python), "-I", "-c", BOOTSTRAP, str(REFERENCE)],
            {
                "folder": str(self.folder.absolute()),
                "layerwise": self.layerwise,
                "threads": self.threads,
                "sequences": list(job.sequences) if texts else [],
                "answers": [{"prompt": p, "ids": list(a)} for p, a in zip(job.prompts, answers)] if texts else [],
                "end_ids": list(job.end_ids),
                "length": job.length,
                "probe": job.probe if forced is not None else [],
                "forced": dict(forced or {}),
            },
            out,
            self.log,
            self.what,
        )
        return Outcome(out, found, out / "points")


@dataclass(frozen=True)
class Embedded:
    """An engine folder of the backend openvino, run by lpx's own interpreter."""

    engine: Path
    log: Path

    def answers(self, job: Job, out: Path) -> Mapping[str, Any]:
        """Greedy answers, and whether the engine agrees with itself."""
        return self._run("answers", job, out, {"prompts": list(job.prompts), "length": job.length})

    def compared(self, job: Job, out: Path, forced: Mapping[str, str]) -> Outcome:
        """Logits of the texts, and the points computed from the reference's."""
        found = self._run("logits", job, out, {"sequences": list(job.sequences), "forced": dict(forced)})
        points = {point: {"file": file} for point, file in found["points"].items()}
        return Outcome(out, {"points": points}, out)

    def _run(self, task: str, job: Job, out: Path, more: Mapping[str, Any]) -> dict[str, Any]:
        return children.run(
            [sys.executable, "-m", "lpxbuild.verify.candidate"],
            {
                "task": task,
                "engine": str(self.engine.absolute()),
                "probe": job.probe,
                "end_ids": list(job.end_ids),
                **more,
            },
            out,
            self.log,
            "the embedded engine",
        )


def plain_folder(checkpoint: Path, folder: Path) -> None:
    """A unified checkpoint as a plain Hugging Face folder: float32 weights, one tensor in memory at a time."""
    import numpy as np
    from safetensors.numpy import save_file

    from lpxbuild.checkpoint.unified.reader import read_unified

    reader = read_unified(checkpoint)
    folder.mkdir(parents=True)
    config = {name: value for name, value in reader.config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
    for name in ("generation_config.json",):
        if (checkpoint / name).is_file():
            shutil.copy(checkpoint / name, folder)
    weight_map = {}
    for number, name in enumerate(reader.weights):
        file = f"model-{number:05d}.safetensors"
        save_file({name: np.ascontiguousarray(reader.weight(name))}, folder / file, metadata={"format": "pt"})
        weight_map[name] = file
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
