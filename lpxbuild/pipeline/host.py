"""Cheap questions first: what this version can build, and what this host has, before anything is loaded or written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.errors import HostError, RecipeError
from lpxbuild.pipeline.placing import free_bytes

if TYPE_CHECKING:
    from lpxbuild.recipe import Recipe

WITHOUT_GPU: Mapping[str, tuple[str, ...]] = {
    "openvino": ("source", "calibration", "checkpoint", "engine", "repository", "verify", "smoke"),
    "tensorrt": ("source", "calibration", "checkpoint"),
    "pytorch": ("source", "calibration", "checkpoint"),
    "vllm": ("source", "calibration", "checkpoint"),
}
"""Backend → stages that this version can run; absent: none."""

NEEDS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "engine": (("openvino", "openvino"),),
    "smoke": (("openvino_genai", "openvino-genai"), ("pytriton", "nvidia-pytriton")),
}
"""Stage → (module, distribution) that the base installation lacks."""

ENGINE_HOST_MODULES = ("openvino_genai",)
"""Modules that only the engine host's interpreter needs (`runtime.python`, when given)."""

SPARE_DISK = 16 << 20
"""Bytes left free beside an artifact."""


def check_recipe(recipe: Recipe, stages: tuple[str, ...]) -> None:
    """Refuse a format or backend that this version cannot build, before any download.

    Raises:
        RecipeError: names what can be built.
    """
    from lpxbuild.quantization import check_kv_cache, format_for
    from lpxbuild.quantization.scheme import Scheme

    backend = recipe.backend
    can = WITHOUT_GPU.get(backend, ())
    beyond = [stage for stage in stages if stage not in can]
    if not can:
        raise RecipeError(
            f"backend {backend} is not built by this version of lpx",
            why="it builds: openvino (every stage), tensorrt (--to source and --to checkpoint)",
            next="set `backend: openvino`, or --backend openvino",
        )
    if beyond:
        raise RecipeError(
            f"backend {backend} is built up to the stage `{can[-1]}` by this version of lpx, not to `{stages[-1]}`",
            why=f"the stage `{beyond[0]}` of {backend} needs a GPU release; "
            "backend openvino runs every stage on any CPU",
            next=f"lpx build RECIPE --to {can[-1]}, or --backend openvino",
        )
    if "checkpoint" in stages:
        for name in Scheme.of(recipe.quantization).formats:
            format_for(name, backend=backend)
        check_kv_cache(recipe.quantization.kv_cache, backend=backend)


def check_packages(recipe: Recipe, stages: tuple[str, ...], *, gguf: bool) -> None:
    """Refuse stages whose packages are missing, before the expensive ones begin.

    Raises:
        HostError: names the package and the extra that brings it.
    """
    if gguf and find_spec("gguf") is None:
        raise HostError(
            "the package gguf is not installed", why="model.source is a .gguf", next="pip install 'lpxbuild[gguf]'"
        )
    for stage in stages:
        for module, distribution in NEEDS.get(stage, ()):
            if module in ENGINE_HOST_MODULES and recipe.runtime.python:
                continue
            if find_spec(module) is None:
                can = [name for name in ("source", "checkpoint") if name in stages]
                raise HostError(
                    f"the package {distribution} is not installed",
                    why=f"the stage `{stage}` of backend {recipe.backend} needs it (Python 3.10-3.12)",
                    next="pip install 'lpxbuild[embedded]'" + (f", or stop earlier: --to {can[-1]}" if can else ""),
                )


def check_disk(folder: Path, needed: int, stage: str) -> None:
    """Refuse a stage whose output cannot fit.

    Raises:
        HostError: names both numbers.
    """
    free = free_bytes(folder)
    if free < needed + SPARE_DISK:
        raise HostError(
            f"{stage}: about {mb(needed + SPARE_DISK)} of disk needed, {mb(free)} free in {folder}",
            why=f"a stage is only begun where its result has room ({mb(needed)}, and {mb(SPARE_DISK)} to spare)",
            next="lpx cache prune --dry-run shows what could go; or set LPX_CACHE to a folder on a larger disk",
        )


def mb(size: int) -> str:
    """Bytes for people: `12 MB`, `3.4 GB`."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
