"""Tiny models with a tokenizer, built; and verify with what does not change between two runs remembered."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lpxbuild import checkpoint, source, verify
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.recipe.schema import Limits, Runtime, Verify
from lpxbuild.verify import candidate, sides

sys.path.insert(0, str(Path(__file__).parent))
from planting import Planted  # isort: skip

LIMITS = Limits(max_batch_size=1, max_input_len=96, max_seq_len=128, max_num_tokens=64)
RUNTIME = Runtime(threads=1, kv_cache_gib=0.05)
SETTINGS = Verify(tokens=192, prompts=["The"])


@pytest.fixture(scope="session")
def speaking_models(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name → a tiny model's folder with a tokenizer whose tokens are bytes."""
    place = tmp_path_factory.mktemp("speaking")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[letter] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()

    def model(name: str) -> Path:
        folder = place / name
        if not folder.exists():
            shutil.copytree(tiny_models / name, folder)
            tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return model


def compiled(checkpoint_folder: Path, engine: Path) -> Path:
    engine.mkdir(parents=True)
    compile_engine("openvino", checkpoint_folder, engine, limits=LIMITS, runtime=RUNTIME, output=Output.quiet())
    return engine


@pytest.fixture(scope="session")
def built(speaking_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """(name, splits, scheme …) → the sound build of a tiny model, converted and compiled once."""
    made: dict[Any, verify.VerifyInput] = {}

    def build(
        name: str,
        tensor: int = 1,
        pipeline: int = 1,
        *,
        dtype: str = "float32",
        scheme: Scheme | str = "none",
        calibration: Any = None,
    ) -> verify.VerifyInput:
        scheme = Scheme(scheme, group_size=64) if isinstance(scheme, str) else scheme
        key = (name, tensor, pipeline, dtype, repr(scheme))
        if key not in made:
            place = tmp_path_factory.mktemp("built")
            (place / "checkpoint").mkdir()
            checked = source.check(
                speaking_models(name),
                origin=name,
                need_tokenizer=False,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                output=Output.quiet(),
            )
            checkpoint.convert(
                checked,
                place / "checkpoint",
                dtype=dtype,
                scheme=scheme,
                calibration=calibration,
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                output=Output.quiet(),
            )
            made[key] = verify.VerifyInput(
                source=speaking_models(name),
                checkpoint=place / "checkpoint",
                engine=compiled(place / "checkpoint", place / "engine"),
                layout="tensorrt_llm",
                max_seq_len=128,
                threads=1,
            )
        return made[key]

    return build


@pytest.fixture(scope="session")
def compare(reference_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., verify.Verdict]:
    """verify.run; the reference of a model is computed once, and the engine runs in this process."""
    remembered: dict[Any, Any] = {}
    place = tmp_path_factory.mktemp("reference")
    run_reference = sides.Transformers.run

    def reference(
        self: sides.Transformers,
        job: sides.Job,
        out: Path,
        answers: Sequence[Sequence[int]],
        *,
        texts: bool,
        forced: Mapping[str, str] | None,
    ) -> sides.Outcome:
        key = (self.folder, repr(job.sequences))
        if key not in remembered:
            kept = place / str(len(remembered))
            remembered[key] = run_reference(self, job, kept, answers, texts=texts, forced=forced)
        return remembered[key]

    def embedded(self: sides.Embedded, task: str, job: sides.Job, out: Path, more: Mapping[str, Any]) -> dict[str, Any]:
        out.mkdir()
        graph = candidate.Graph(self.engine)
        whole = {"out": str(out), "probe": job.probe, "end_ids": job.end_ids, **more}
        return (candidate.answers if task == "answers" else candidate.logits)(graph, whole)

    def run(given: verify.VerifyInput, folder: Path, *, really: bool = False) -> verify.Verdict:
        with pytest.MonkeyPatch.context() as patch:
            if not really:
                patch.setattr(sides.Transformers, "run", reference)
                patch.setattr(sides.Embedded, "_run", embedded)
            return verify.run(
                given, SETTINGS, base=folder, python=reference_python, log=folder / "verify.log", output=Output.quiet()
            )

    return run


@pytest.fixture
def planted(tmp_path: Path) -> Callable[[verify.VerifyInput, Callable[[Any], None]], verify.VerifyInput]:
    """A copy of a sound build with an error planted into its checkpoint, compiled from that."""

    def plant(sound: verify.VerifyInput, error: Callable[[Any], None]) -> verify.VerifyInput:
        copy = tmp_path / "checkpoint"
        shutil.copytree(sound.checkpoint, copy)
        for file in copy.rglob("*"):
            file.chmod(0o644 if file.is_file() else 0o755)
        error(Planted(copy))
        return replace(sound, checkpoint=copy, engine=compiled(copy, tmp_path / "engine"))

    return plant
