"""The stage `calibration` of a build."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.pipeline.stages import Work, plain, reference_python

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe


def applies(recipe: Recipe, _base: Path) -> bool:
    """Whether a format of the recipe needs text to be run through the model."""
    from lpxbuild.quantization.scheme import Scheme

    return Scheme.of(recipe.quantization).needs_calibration


def inputs(recipe: Recipe, base: Path) -> dict[str, str]:
    """The texts, and the versions that compute."""
    from lpxbuild.quantization.calibration import inputs as of_calibration

    return of_calibration(recipe.quantization.calibration, base=base, python=reference_python(recipe, base))


def left_out(work: Work) -> str | None:
    """A source that is quantized already has its scales; an FP8 KV cache of TensorRT-LLM's layout can do without."""
    from lpxbuild.source import is_quantized

    if is_quantized(work.paths["source"]):
        return "the source is quantized already and has its scales"
    return cache_without_measuring(work.recipe, work.base)


def cache_without_measuring(recipe: Recipe, base: Path) -> str | None:
    """Why an FP8 KV cache gets scales of 1.0: it is all that would be measured, and nothing here can."""
    from lpxbuild.errors import HostError
    from lpxbuild.quantization.calibration.interpreter import check_interpreter
    from lpxbuild.quantization.scheme import Scheme

    if recipe.checkpoint_layout != "tensorrt_llm" or not Scheme.of(recipe.quantization).only_fp8_cache:
        return None
    try:
        check_interpreter(reference_python(recipe, base))
    except HostError as error:
        return error.what
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
