"""The stage `calibration` of a build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.pipeline.stages import Work, plain, reference_python

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe


def applies(recipe: Recipe, _base: Path) -> bool:
    """Whether a format of the recipe needs text to be run through the model.

    An FP8 KV cache alone does in the unified layout. TensorRT-LLM's has no scale below 1.0, and almost always 1.0, so
    there it is the recipe that asks for a measurement, by naming `quantization.calibration`: what this host has
    installed must not decide about the bytes.
    """
    from lpxbuild.quantization.scheme import Scheme

    scheme = Scheme.of(recipe.quantization)
    if scheme.only_fp8_cache and recipe.checkpoint_layout == "tensorrt_llm":
        return "calibration" in recipe.quantization.model_fields_set
    return scheme.needs_calibration


def inputs(recipe: Recipe, base: Path) -> dict[str, str]:
    """The texts, and the versions that compute."""
    from lpxbuild.quantization.calibration import inputs as of_calibration

    return of_calibration(recipe.quantization.calibration, base=base, python=reference_python(recipe, base))


def left_out(work: Work) -> str | None:
    """A source that is quantized already has its scales."""
    from lpxbuild.source import is_quantized

    if is_quantized(work.paths["source"]):
        return "the source is quantized already and has its scales"
    return None


def run_stage(work: Work, destination: Path) -> dict[str, Any]:
    """Run the texts through the model."""
    from lpxbuild.quantization import calibration
    from lpxbuild.quantization.scheme import Scheme

    recipe = work.recipe
    report = calibration.calibrate(
        work.paths["source"],
        destination,
        scheme=Scheme.of(recipe.quantization),
        settings=recipe.quantization.calibration,
        base=work.base,
        python=reference_python(recipe, work.base),
        log=work.logs / "calibration.log",
        output=work.output,
    )
    return plain(report)
