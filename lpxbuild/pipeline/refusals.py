"""Everything that can be refused without reading a weight, asked before the first stage that has to run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.pipeline.stages import Stage, reference_python

if TYPE_CHECKING:
    from lpxbuild.families import ModelShape
    from lpxbuild.recipe import Recipe
    from lpxbuild.source import Source
    from lpxbuild.source.quantized import SourceQuantization


def check(
    recipe: Recipe,
    stages: Sequence[Stage],
    first: Stage,
    *,
    source: Callable[[], Source],
    folder: Path,
    base: Path,
    cache: Path,
) -> None:
    """Refuse what the stages from `first` on would fail at.

    Args:
        stages: of this build.
        first: the first one that has to run.
        source: checks the source (once) and returns it.
        folder: the Hugging Face folder.
        base: folder that relative paths of the recipe start from.
        cache: root of the cache.

    Raises:
        SourceError, RecipeError, HostError: what does not fit, and what would.
    """
    names = {stage.name for stage in stages}
    if "smoke" in names:
        from lpxbuild.server import embedded
        from lpxbuild.server.checks import check_cache_memory

        embedded.find(cache)
        check_cache_memory(recipe.runtime.kv_cache_bytes)
    if "verify" in names:
        from lpxbuild.pipeline import verifying

        verifying.check(recipe, folder, base)
    if first.name not in ("calibration", "checkpoint", "engine"):
        return
    found = source()
    _check_model(recipe, names, found.shape, found.quantization)
    if first.name == "calibration" and found.quantization is None:
        from lpxbuild.quantization.calibration import check_calibration

        check_calibration(
            recipe.quantization.calibration, folder=folder, base=base, python=reference_python(recipe, base)
        )


def check_from_config(recipe: Recipe, stages: Sequence[Stage], folder: Path) -> None:
    """The part of `check` that the recipe and the small JSON files of a Hugging Face folder decide, for `--why`.

    Raises:
        SourceError, RecipeError: as `check`.
    """
    from lpxbuild.quantization.scheme import Scheme
    from lpxbuild.source import check_config

    config, settings, family = check_config(
        folder,
        tensor_parallel=recipe.parallel.tensor,
        pipeline_parallel=recipe.parallel.pipeline,
        layout=recipe.checkpoint_layout,
        scheme=Scheme.of(recipe.quantization),
        backend=recipe.backend,
    )
    if settings is None:
        _check_model(recipe, {stage.name for stage in stages}, family.model_shape(config), None)


def _check_model(
    recipe: Recipe, names: Collection[str], shape: ModelShape, quantization: SourceQuantization | None
) -> None:
    """Formats, sizes and lengths, by the layout that the backend reads, and what its engine runs."""
    _check_checkpoint(recipe, shape, quantization)
    if "engine" in names:
        from lpxbuild.engine import check_features, check_positions
        from lpxbuild.families import attention_features

        check_features(attention_features(shape, recipe.limits.max_seq_len), recipe.backend)
        check_positions(shape, recipe.limits.max_seq_len)
    elif recipe.checkpoint_layout == "tensorrt_llm":
        from lpxbuild.pipeline.converting import check_rope

        check_rope(shape, recipe.limits.max_seq_len)


def _check_checkpoint(recipe: Recipe, shape: ModelShape, quantization: SourceQuantization | None) -> None:
    from lpxbuild.quantization import check_shapes
    from lpxbuild.quantization.scheme import Scheme

    asked = Scheme.of(recipe.quantization)
    if recipe.checkpoint_layout == "tensorrt_llm":
        from lpxbuild.checkpoint import check_scheme

        stored = asked if quantization is None else quantization.scheme
        loaders = None if quantization is None else quantization.loaders
        check_shapes(shape, stored, recipe.parallel.tensor, loaders=loaders)
        if quantization is None:
            check_scheme(shape, asked, recipe.parallel.tensor, recipe.parallel.pipeline)
    elif quantization is None:
        from lpxbuild.checkpoint.unified import check_unified

        check_unified(shape, asked, backend=recipe.backend)
