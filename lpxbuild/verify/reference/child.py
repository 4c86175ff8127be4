"""The child's work, from the job's file to result.json."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from .loading import HOST_LACKS, MODEL_REFUSED, Refused, layerwise, whole
from .places import points
from .texts import answer_of, hidden_states, logits_of, write_logits


def work(job: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(job["threads"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder = Path(job["out"])
    try:
        model = (layerwise if job["layerwise"] else whole)(job["folder"]).eval()
    except (ValueError, KeyError, ImportError) as error:
        raise Refused(MODEL_REFUSED, f"transformers cannot load the model: {' '.join(str(error).split())}") from None
    result: dict[str, Any] = {"class": type(model).__name__, "answers": []}
    with torch.inference_mode():
        answers = job["answers"]
        sequences = [*job["sequences"], *([*answer["prompt"], *answer["ids"]] for answer in answers)]
        hidden, output_class = hidden_states(model, sequences) if sequences else ([], None)
        for number in range(len(job["sequences"])):
            write_logits(model, hidden[number], output_class, folder / f"logits{number}.npy")
        length, ends = 0 if job["layerwise"] else job["length"], job["end_ids"]
        for answer, states in zip(answers, hidden[len(job["sequences"]) :]):
            prompt, given = answer["prompt"], answer["ids"]
            choices = logits_of(model, states[len(prompt) - 1 :], output_class).argmax(-1).tolist()
            result["answers"].append(answer_of(model, choices, prompt, given, length=length, ends=ends))
        if job["probe"]:
            result["points"] = points(model, job["probe"], folder / "points", job["forced"])
    (folder / "result.json").write_text(json.dumps(result))


def main(path: str) -> int:
    job = json.loads(Path(path).read_bytes())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive lpx, however that ends
    if os.getppid() != job["parent"]:
        return 1
    warnings.simplefilter("ignore")
    try:
        work(job)
    except Refused as refused:
        sys.stderr.write(f"{refused}\n")
        return refused.status
    except MemoryError:
        sys.stderr.write("memory ran out\n")
        return HOST_LACKS
    return 0
