"""Runs the child that calibrates: owned, logged, ended with lpx."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, LpxError, SourceError, ToolError
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import RECORD, SCALES
from lpxbuild.quantization.calibration.checks import check_calibration, inputs, memory_needed
from lpxbuild.quantization.calibration.datasets import Texts, read_texts
from lpxbuild.quantization.calibration.interpreter import interpreter
from lpxbuild.quantization.scheme import Scheme

CHILD = Path(__file__).with_name("child.py")
MODEL_REFUSED, HOST_LACKS = 2, 3
"""Exit statuses of the child with a meaning."""
BATCH_TOKENS = 2048
"""Most tokens that go through the model at a time."""
KEPT = 0.9
"""Least share of a text that stays when it is cut to the shortest of its batch."""
FORMAT_VERSION = 1
"""Of calibration.json."""


@dataclass(frozen=True)
class CalibrationReport:
    """What was run.

    Attributes:
        formats: formats whose activations were collected, with the KV cache's as "kv:fp8".
        texts, tokens: how many were run through the model.
        token_digest: SHA-256 of the token ids.
        inputs: the texts' identity and the versions that computed.
        tensors: numbers and vectors that were kept.
        seconds: wall time.
    """

    formats: tuple[str, ...]
    texts: int
    tokens: int
    token_digest: str
    inputs: dict[str, str]
    tensors: int
    seconds: float


def calibrate(
    folder: Path,
    destination: Path,
    *,
    scheme: Scheme,
    settings: Any,
    base: Path,
    python: Path | None,
    log: Path,
    output: Output,
) -> CalibrationReport:
    """Run the texts through the model and write `scales.safetensors` and `calibration.json`.

    Args:
        folder: a Hugging Face folder with tokenizer.json.
        destination: an empty folder.
        scheme: the formats; what they leave out is measured all the same.
        settings: the recipe's `quantization.calibration`.
        base: folder that relative paths start from.
        python: interpreter with the extra `calibrate`; None = lpx's own.
        log: file for the child's output.

    Raises:
        HostError, SourceError: as `check_calibration`; the model is none that ModelOpt and transformers can run.
        ToolError: the child failed; names its log.
    """
    started = time.monotonic()
    check_calibration(settings, folder=folder, base=base, python=python)
    chosen = read_texts(settings, base=base, python=python)
    if len(chosen.texts) < settings.samples:
        output.notice(
            f"calibration dataset {settings.dataset} has {len(chosen.texts)} texts, "
            f"quantization.calibration.samples asks for {settings.samples}: all are used"
        )
    batches = batched(token_ids(folder, chosen.texts, settings.sequence_length))
    formats = tuple(name for name in scheme.formats if name != "none")
    formats += () if scheme.kv_cache == "none" else (f"kv:{scheme.kv_cache}",)
    texts = sum(map(len, batches))
    tokens = sum(len(sequence) for batch in batches for sequence in batch)
    output.step(f"calibration: {texts} texts, {tokens} tokens, for {', '.join(formats)} (log: {log})")
    run_child(
        folder,
        destination,
        scheme=scheme,
        batches=batches,
        device=settings.device,
        seed=settings.seed,
        python=python,
        log=log,
        output=output,
    )
    report = CalibrationReport(
        formats=formats,
        texts=texts,
        tokens=tokens,
        token_digest=hashlib.sha256(json.dumps(batches).encode()).hexdigest(),
        inputs=inputs(settings, base=base, python=python),
        tensors=_count(destination / SCALES),
        seconds=round(time.monotonic() - started, 3),
    )
    _write_record(destination / RECORD, report, scheme, settings, chosen)
    output.step(f"calibration: done in {report.seconds:.1f} s")
    return report


def run_child(
    folder: Path,
    destination: Path,
    *,
    scheme: Scheme,
    batches: Sequence[Sequence[Sequence[int]]],
    device: str,
    seed: int,
    python: Path | None,
    log: Path,
    output: Output,
) -> None:
    """Write `scales.safetensors` from these token ids.

    Args:
        batches: what goes through the model at a time: sequences of one length.

    Raises:
        SourceError, HostError, ToolError: as `calibrate`.
    """
    scratch = destination / "child"  # its job, and the TMPDIR of what ModelOpt writes and leaves behind
    scratch.mkdir(parents=True)
    job = scratch / "job.json"
    job.write_text(
        json.dumps(
            {
                "parent": os.getpid(),
                "folder": str(folder.absolute()),
                "scales": str((destination / SCALES).absolute()),
                "batches": batches,
                "format": scheme.format,
                "overrides": dict(scheme.overrides),
                "kv_cache": scheme.kv_cache,
                "group_size": scheme.group_size,
                "device": device,
                "memory": memory_needed(folder),
                "seed": seed,
            }
        ),
        encoding="utf-8",
    )
    try:
        _run([str(interpreter(python)), "-I", str(CHILD), str(job)], scratch, log, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def token_ids(folder: Path, texts: Sequence[str], longest: int) -> list[list[int]]:
    """Token ids of the texts, the tokenizer's special tokens included, cut to `longest`; empty ones are left out.

    Raises:
        SourceError: no text gives a token.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = [_first_ids(tokenizer, text, longest) for text in texts]
    ids = [sequence for sequence in ids if sequence]
    if not ids:
        raise SourceError(
            "the calibration texts give no tokens with this model's tokenizer",
            next="choose other texts in quantization.calibration.dataset",
        )
    return ids


def batched(sequences: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Batches of texts of about one length, cut to the shortest of them, the longest first.

    AWQ quantizes every weight eleven times for each batch, so few batches are fast; padding would be measured as well.
    """
    batches: list[list[list[int]]] = []
    longest = 0
    for sequence in sorted(sequences, key=len, reverse=True):
        fits = batches and len(sequence) >= KEPT * longest and (len(batches[-1]) + 1) * longest <= BATCH_TOKENS
        if not fits:
            batches.append([])
            longest = len(sequence)
        batches[-1].append(list(sequence))
    return [[sequence[: len(batch[-1])] for sequence in batch] for batch in batches]


def _first_ids(tokenizer: Any, text: str, longest: int) -> list[int]:
    """A book in one line need not be tokenized to its end, as long as its beginning gives enough."""
    beginning = text[: 32 * longest]
    ids: list[int] = tokenizer.encode(beginning).ids
    if len(ids) <= longest and len(beginning) < len(text):
        ids = tokenizer.encode(text).ids
    return ids[:longest]


def _write_record(path: Path, report: CalibrationReport, scheme: Scheme, settings: Any, chosen: Texts) -> None:
    record = {
        "format_version": FORMAT_VERSION,
        "scheme": scheme.as_dict(),
        "settings": settings.model_dump(mode="json"),
        "revision": chosen.revision,
        "texts": report.texts,
        "tokens": report.tokens,
        "token_digest": report.token_digest,
        "inputs": report.inputs,
    }
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _run(command: list[str], scratch: Path, log: Path, output: Output) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",  # the model lies on disk; nothing is to be fetched for it
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # the same sums in the same order
        "TMPDIR": str(scratch.absolute()),
    }
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env=environment,
            text=True,
        )
        try:
            _follow(child, output)
            status = child.wait()
        except BaseException:
            _kill(child)
            raise
    if status != 0:
        raise _failed(status, log)


def _follow(child: subprocess.Popen[str], output: Output) -> None:
    """The child says `total N` once and `done n` after each batch; other lines of its libraries are nothing to us."""
    assert child.stdout is not None
    total = next((line for line in child.stdout if line.startswith("total ")), None)
    if total is None:
        return
    with output.progress("calibration (tokens)", int(total.split()[1])) as advance:
        for line in child.stdout:
            if line.startswith("done "):
                advance(int(line.split()[1]))


def _kill(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _failed(status: int, log: Path) -> LpxError:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    log_text = f"the whole output is in {log}"
    if status == HOST_LACKS:
        return HostError(last, why=log_text, next="set quantization.calibration.device to cpu, or free memory")
    if status == MODEL_REFUSED:
        return SourceError(
            last,
            why=f"calibration runs the model with transformers and NVIDIA ModelOpt; {log_text}",
            next="choose a format that needs no calibration (docs/formats.md)",
        )
    if status == -signal.SIGKILL:
        return HostError(
            "the calibration was killed, most likely because memory ran out",
            why=log_text,
            next="free memory, or calibrate on a larger host and share LPX_CACHE",
        )
    return ToolError(
        f"the calibration ended with status {status}: {last}",
        why="NVIDIA ModelOpt runs the texts through the model in a process of its own",
        next=f"less {log}",
    )


def _count(scales: Path) -> int:
    with scales.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(name != "__metadata__" for name in header)
