"""Compares what was built with its source, and judges."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.memory import available_memory
from lpxbuild.output import Output
from lpxbuild.verify import checks, metrics, texts
from lpxbuild.verify.built import VerifyInput, end_ids_of, formats_of, probe_tokens
from lpxbuild.verify.modules import judge
from lpxbuild.verify.sides import Embedded, Job, Outcome, Transformers, plain_folder
from lpxbuild.verify.thresholds import bounds
from lpxbuild.verify.verdict import Answer, Status, Verdict, measures

ANSWER_TOKENS = 24
TOLERANCE = 1e-3
"""Largest difference of logits between a text in one piece and in several, relative to their spread."""


def run(
    built: VerifyInput,
    settings: Any,
    *,
    base: Path,
    python: Path | None,
    log: Path,
    output: Output,
    layerwise: bool | None = None,
) -> Verdict:
    """Compare.

    Args:
        settings: the recipe's `verify`.
        base: folder that relative paths of the recipe start from.
        python: `runtime.reference_python`, None = lpx's own interpreter.
        log: file for the children's output; scratch files go beside it.
        layerwise: run the reference layer by layer; None = where it does not fit into memory as a whole.

    Returns:
        The verdict; "self-consistent" where there is no reference to compare with.

    Raises:
        SourceError: the text cannot be read, or transformers cannot load the model.
        HostError, ToolError: a child failed.
    """
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="verify-", dir=log.parent) as scratch:
        comparison = _Comparison(built, settings, base, python, log, output, Path(scratch))
        verdict = comparison.verdict(layerwise)
    return _timed(verdict, time.monotonic() - started)


class _Comparison:
    """One run."""

    def __init__(
        self,
        built: VerifyInput,
        settings: Any,
        base: Path,
        python: Path | None,
        log: Path,
        output: Output,
        scratch: Path,
    ) -> None:
        from tokenizers import Tokenizer

        from lpxbuild.quantization.calibration.interpreter import interpreter

        self.built, self.settings, self.python, self.log = built, settings, python, log
        self.output, self.scratch, self.how = output, scratch, ""
        self.interpreter = interpreter(python)
        self.threads = built.threads or os.cpu_count() or 1
        self.tokenizer = Tokenizer.from_file(str(built.source / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.texts = texts.tokenized(self.tokenizer, settings, base, longest=built.max_seq_len)
        self.source_config = json.loads((built.source / "config.json").read_bytes())
        self.formats, self.format_of, self.dtype = formats_of(built)
        self.job = Job(
            sequences=self.texts.sequences,
            probe=self.texts.sequences[0][: probe_tokens(self.source_config)],
            prompts=tuple(ids for _, ids in self.texts.prompts),
            end_ids=end_ids_of(built.source, self.source_config),
            length=max(1, min(ANSWER_TOKENS, built.max_seq_len - max([1, *(len(i) for _, i in self.texts.prompts)]))),
        )

    def verdict(self, layerwise: bool | None) -> Verdict:
        checks.check_scratch(self.scratch, self.texts.tokens * self.tokenizer.get_vocab_size() * 8)
        reason = checks.missing_packages(self.python) or checks.not_judgeable(self.built.source, self.python)
        if self.built.layout == "unified_hf":
            if reason is not None:
                return self._self_consistent(reason, None)
            return self._against_transformers(layerwise)
        engine = self.built.engine or self._compiled()
        side = Embedded(engine, self.log)
        self.output.step("verify: the engine answers prompts")
        own = side.answers(self.job, self.scratch / "answers")
        if problem := _contradiction(own):
            return Verdict("fail", (problem,), self._format_text())
        if reason is not None:
            return self._self_consistent(reason, own)
        try:
            reference = self._reference(own["answers"], layerwise)
        except SourceError as error:
            return self._self_consistent(error.what, own)
        self.output.step("verify: the engine runs the same texts")
        candidate = side.compared(self.job, self.scratch / "candidate", reference.point_files())
        fast = json.loads((engine / "engine.json").read_bytes())["precision"] == "fast"
        return self._judged(reference, candidate, own["answers"], fast=fast)

    def _against_transformers(self, layerwise: bool | None) -> Verdict:
        """A unified checkpoint: its dequantized weights in transformers, with its own config."""
        plain = self.scratch / "plain"
        self.output.step("verify: dequantizing the checkpoint")
        plain_folder(self.built.checkpoint, plain)
        candidate = self._transformers(plain, layerwise, "transformers on the checkpoint")
        empty: list[list[int]] = [[] for _ in self.job.prompts]
        try:
            own = candidate.run(self.job, self.scratch / "answers", empty, texts=True, forced=None)
            answers = [answer["ids"] for answer in own.result["answers"]]
            reference = self._reference(answers, layerwise)
            inside = candidate.run(
                self.job, self.scratch / "candidate", empty, texts=False, forced=reference.point_files()
            )
        except SourceError as error:
            return self._self_consistent(error.what, None)
        both = Outcome(own.folder, inside.result, inside.points_folder)
        return self._judged(reference, both, answers, fast=False)

    def _reference(self, answers: Sequence[Sequence[int]], layerwise: bool | None) -> Outcome:
        side = self._transformers(self.built.source, layerwise, "transformers on the source")
        how = "layer by layer" if side.layerwise else "as a whole"
        self.how = how
        self.output.step(f"verify: transformers runs {self.texts.tokens} tokens through the source {how}")
        return side.run(self.job, self.scratch / "reference", answers, texts=True, forced={})

    def _transformers(self, folder: Path, layerwise: bool | None, what: str) -> Transformers:
        if layerwise is None:
            layerwise = checks.whole_bytes(folder) > checks.SHARE * available_memory()
        return Transformers(folder, self.interpreter, self.threads, layerwise, self.log, what)

    def _compiled(self) -> Path:
        """An engine of the checkpoint, for a backend that has none or cannot run here."""
        from lpxbuild.engine import compile_engine
        from lpxbuild.recipe.schema import Limits, Runtime

        folder = self.scratch / "engine"
        folder.mkdir()
        longest = max(map(len, self.job.sequences)) + self.job.length
        limits = Limits(max_batch_size=1, max_input_len=longest, max_seq_len=max(longest, 64))
        # The paged cache is not used: it only has to pass the compiler's check.
        runtime = Runtime(threads=self.threads, kv_cache_gib=1024.0)
        compile_engine("openvino", self.built.checkpoint, folder, limits=limits, runtime=runtime, output=Output.quiet())
        return folder

    def _judged(
        self, reference: Outcome, candidate: Outcome, answers: Sequence[Sequence[int]], *, fast: bool
    ) -> Verdict:
        pairs = [(reference.logits(n), candidate.logits(n), ids) for n, ids in enumerate(self.job.sequences)]
        tokens = metrics.compare(pairs)
        formats = [*self.formats, "int8_wo"] if fast else self.formats
        warn, fail = bounds(formats, self.settings.warn, self.settings.fail)
        found = measures(
            metrics.estimate(tokens.agree),
            metrics.estimate(tokens.kl),
            metrics.estimate(tokens.candidate_loss - tokens.reference_loss, _rise),
            warn,
            fail,
        )
        modules = tuple(
            judge(
                reference.result["points"],
                reference.points_folder,
                {point: described["file"] for point, described in candidate.result["points"].items()},
                candidate.points_folder,
                format_of=_as_fast(self.format_of) if fast else self.format_of,
                stored=checks.stored_type(self.built.source, self.dtype),
                dtype=self.dtype,
                fast=fast,
            )
        )
        if not modules:
            raise SourceError(
                "the engine has no named places to compare",
                why="it was compiled by an earlier version of lpx",
                next="lpx build RECIPE --force",
            )
        reasons = [f"{module.name}: {module.why}" for module in modules if not module.ok]
        if not tokens.finite:
            reasons.insert(0, "some logits are inf or nan")
        failed = bool(reasons)
        reasons += [f"{module.name} is lossy: {module.lossy}" for module in modules if module.lossy]
        for one in found:
            if one.status != "pass":
                bound = one.fail if one.status == "fail" else one.warn
                reasons.append(f"{one.name} is {one.estimate.value:.4g}, the bound is {bound:g}")
            failed = failed or one.status == "fail"
        status: Status = "fail" if failed else "warn" if reasons else "pass"
        pieces = self._token_texts()
        worst = int(tokens.kl.argmax())
        return Verdict(
            status,
            tuple(reasons),
            self._format_text(),
            tokens=self.texts.tokens,
            text=self.texts.name,
            measures=found,
            perplexity=(_perplexity(tokens.reference_loss), _perplexity(tokens.candidate_loss)),
            max_kl=(float(tokens.kl[worst]), "".join(pieces[max(0, worst - 12) : worst + 1])),
            modules=modules,
            answers=self._answers(reference.result["answers"], answers),
            token_kl=tuple(zip(pieces, (float(value) for value in tokens.kl))),
            notes=(*self._notes(fast), *_not_compared(reference, candidate)),
            facts=self._facts(reference),
        )

    def _self_consistent(self, reason: str, own: Mapping[str, Any] | None) -> Verdict:
        shown = () if own is None else tuple(self._answers([None] * len(self.job.prompts), own["answers"]))
        return Verdict(
            "self-consistent",
            (reason,),
            self._format_text(),
            text=self.texts.name,
            answers=shown,
            notes=self._notes(False),
        )

    # In words

    def _format_text(self) -> str:
        return ", ".join(self.formats)

    def _token_texts(self) -> list[str]:
        """The piece of text that each token adds."""
        found: list[str] = []
        for ids in self.job.sequences:
            before = ""
            for position in range(len(ids)):
                # A few tokens of context make spaces and characters of several tokens come out whole.
                start = max(0, position - 4)
                before = self.tokenizer.decode(ids[start:position], skip_special_tokens=False)
                now = self.tokenizer.decode(ids[start : position + 1], skip_special_tokens=False)
                found.append(now[len(before) :] if now.startswith(before) else "\ufffd")
        return found

    def _answers(self, reference: Sequence[Mapping[str, Any] | None], candidate: Any) -> tuple[Answer, ...]:
        found = []
        for (prompt, _), one, other in zip(self.texts.prompts, reference, candidate):
            wanted = one["ids"] if one is not None else []
            agree = next((i for i, (a, b) in enumerate(zip(wanted, other)) if a != b), min(len(wanted), len(other)))
            found.append(
                Answer(
                    prompt,
                    self.tokenizer.decode(wanted),
                    self.tokenizer.decode(other),
                    agree,
                    len(other),
                    one is not None and one["complete"],
                )
            )
        return tuple(found)

    def _notes(self, fast: bool) -> tuple[str, ...]:
        """What the numbers do not say anything about."""
        notes = []
        longest = max(map(len, self.job.sequences))
        window = self.source_config.get("sliding_window")
        if isinstance(window, int) and window > longest and self.source_config.get("use_sliding_window", True):
            notes.append(f"the sliding window of {window} tokens was not reached: the texts have at most {longest}")
        scaled = sorted({"fp8", "fp8_pc_pt", "int8_sq", "w4a8_awq", "nvfp4"} & set(self.formats))
        if scaled:
            notes.append(
                f"{', '.join(scaled)}: weights as stored, activations in float32; the rounding of activations is not "
                "part of the comparison"
            )
        if fast:
            notes.append("precision fast: the engine's own int8 weights are compared")
        return tuple(notes)

    def _facts(self, reference: Outcome) -> dict[str, Any]:
        from lpxbuild.quantization.calibration.interpreter import versions

        found = versions(self.python)
        return {
            "reference": reference.result["class"],
            "ran": self.how,
            "torch": found["torch"],
            "transformers": found["transformers"],
            "probe_tokens": len(self.job.probe),
            "seed": metrics.SEED,
        }


def _as_fast(format_of: Callable[[str], str]) -> Callable[[str], str]:
    """The engine's int8 weights in place of unquantized ones."""

    def found(module: str) -> str:
        name = format_of(module)
        return "int8_wo" if name == "none" else name

    return found


def _not_compared(reference: Outcome, candidate: Outcome) -> tuple[str, ...]:
    """Places of the source that the engine has no name for; where one norm serves two parts, it has one."""
    missing = sorted(
        point
        for point in reference.result["points"].keys() - candidate.result["points"].keys()
        if not point.endswith(".post_layernorm")
    )
    return (f"the engine has no place for {', '.join(missing[:4])}",) if missing else ()


def _contradiction(own: Mapping[str, Any]) -> str | None:
    """What the engine alone shows to be wrong."""
    if not own["finite"]:
        return "some logits are inf or nan"
    if own["pieces_difference"] > TOLERANCE * max(own["spread"], 1e-6):
        return (
            f"the engine contradicts itself: a text in one piece and in pieces of 7 tokens gives logits that differ by "
            f"{own['pieces_difference']:.3g}"
        )
    return None


def _rise(mean: Any) -> float:
    import math

    return math.expm1(min(float(mean), 50.0))


def _perplexity(losses: Any) -> float:
    import math

    import numpy as np

    return math.exp(min(float(np.nanmean(losses)), 50.0))


def _timed(verdict: Verdict, seconds: float) -> Verdict:
    from dataclasses import replace

    return replace(verdict, seconds=round(seconds, 2))


__all__ = ["VerifyInput", "run"]
