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
    """A source that is quantized already has its scales."""
    from lpxbuild.source import is_quantized

    return "the source is quantized already and has its scales" if is_quantized(work.paths["source"]) else None


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
