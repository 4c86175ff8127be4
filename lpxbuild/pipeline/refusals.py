"""Everything that can be refused without reading a weight, asked before the first stage that has to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.pipeline.stages import Stage, reference_python

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe
    from lpxbuild.source import Source


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
    _check_checkpoint(recipe, found)
    if "engine" in names:
        from lpxbuild.engine import check_features, check_positions
        from lpxbuild.families import attention_features

        features = attention_features(found.shape, recipe.limits.max_seq_len)
        check_features(features, recipe.backend)
        check_positions(found.shape, recipe.limits.max_seq_len)
    if first.name == "calibration" and found.quantization is None:
        from lpxbuild.quantization.calibration import check_calibration

        check_calibration(
            recipe.quantization.calibration, folder=folder, base=base, python=reference_python(recipe, base)
        )


def _check_checkpoint(recipe: Recipe, source: Source) -> None:
    """Formats, sizes and lengths, by the layout that the backend reads."""
    from lpxbuild.quantization import check_shapes
    from lpxbuild.quantization.scheme import Scheme

    asked = Scheme.of(recipe.quantization)
    if recipe.checkpoint_layout == "tensorrt_llm":
        from lpxbuild.checkpoint import check_scheme
        from lpxbuild.pipeline.converting import check_rope

        check_rope(source.shape, recipe.limits.max_seq_len)
        loaders = source.quantization.loaders if source.quantization is not None else None
        check_shapes(source.shape, source.scheme(asked), recipe.parallel.tensor, loaders=loaders)
        if source.quantization is None:
            check_scheme(source.shape, asked, recipe.parallel.tensor, recipe.parallel.pipeline)
    elif source.quantization is None:
        from lpxbuild.checkpoint.unified import check_unified

        check_unified(source.shape, asked, backend=recipe.backend)
    else:
        from lpxbuild.checkpoint.unified import check_source

        check_source(source, recipe.backend)
