"""Which tensor × pipeline splits a model allows."""

from __future__ import annotations

from math import gcd, isqrt
from typing import TYPE_CHECKING

from lpxbuild.errors import SourceError
from lpxbuild.families.shape import ModelShape

if TYPE_CHECKING:
    from lpxbuild.families.family import Family


TRTLLM, UNIFIED = "tensorrt_llm", "unified_hf"
"""Names of the layouts; other programs than TensorRT-LLM load the second, so its classes' rules do not hold there."""


def _family(shape: ModelShape) -> Family:
    from lpxbuild.families import family_named  # the registry imports this module

    return family_named(shape.family)


def _misfit(shape: ModelShape, tensor: int, layout: str | None = None) -> tuple[str, int, str] | None:
    """The first config key that does not allow `tensor` ranks: (key, value, reason)."""
    family = _family(shape)
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if heads % tensor:
        key, value, reason = "num_attention_heads", heads, "every rank takes the same number of heads"
    elif kv_heads % tensor and tensor % kv_heads:
        key, value = "num_key_value_heads", kv_heads
        reason = "KV heads are either shared out evenly or copied evenly over the ranks"
    elif kv_heads % tensor and not family.copies_kv_heads and layout != UNIFIED:
        key, value = "num_key_value_heads", kv_heads
        reason = f"KV heads are not copied over ranks for {family.name}: each rank takes the same number"
    elif shape.intermediate_size % tensor:
        key, value = "intermediate_size", shape.intermediate_size
        reason = "every rank takes the same number of MLP columns"
    elif shape.moe and shape.moe.intermediate_size % tensor:
        key, value = "moe_intermediate_size", shape.moe.intermediate_size
        reason = "every rank takes the same number of columns of each expert"
    elif shape.moe and shape.moe.shared_intermediate_size % tensor:
        key, value = "shared_expert_intermediate_size", shape.moe.shared_intermediate_size
        reason = "every rank takes the same number of columns of the shared expert"
    else:
        whole = family.whole if layout != UNIFIED else ()
        uneven = next((name for name in whole if getattr(shape, name) % tensor), None)
        if uneven is None:
            return None
        key, value = uneven, getattr(shape, uneven)
        reason = f"TensorRT-LLM shares this table of {family.name} out evenly, without padding"
    return family.keys.get(key, key), value, reason


def tensor_parallel_sizes(shape: ModelShape, layout: str | None = None) -> tuple[int, ...]:
    """All tensor-parallel sizes that fit, ascending."""
    common = gcd(shape.num_attention_heads, shape.intermediate_size)
    small = [size for size in range(1, isqrt(common) + 1) if common % size == 0]
    return tuple(
        size for size in sorted({*small, *(common // size for size in small)}) if _misfit(shape, size, layout) is None
    )


def check_parallel(shape: ModelShape, tensor: int, pipeline: int, *, layout: str | None = None) -> None:
    """Refuse a split that the sizes do not allow.

    Args:
        layout: of the checkpoint, None while it is not known; for "unified_hf" it is no matter what only TensorRT-LLM's
            classes cannot do, and for "tensorrt_llm" models that they cannot compute at all are refused as well.

    Raises:
        SourceError: names the config key, its value, the size asked for and the sizes that work.
    """
    if layout == TRTLLM:
        check_expressible(shape)
    misfit = _misfit(shape, tensor, layout)
    if misfit is not None:
        key, value, reason = misfit
        sizes = ", ".join(map(str, tensor_parallel_sizes(shape, layout)))
        raise SourceError(
            f"{key} {value} cannot be split over tensor parallel {tensor} (tp_size)",
            why=reason,
            next=f"set parallel.tensor to one of: {sizes}",
        )
    family = _family(shape)
    if pipeline > 1 and not family.pipeline and layout != UNIFIED:
        raise SourceError(
            f"a {family.name} model cannot be split over pipeline parallel {pipeline} (pp_size)",
            why="TensorRT-LLM does not divide models of this family into pipeline stages",
            next="set parallel.pipeline to 1 and use parallel.tensor: "
            + ", ".join(map(str, tensor_parallel_sizes(shape))),
        )
    if pipeline > shape.num_hidden_layers:
        raise SourceError(
            f"num_hidden_layers {shape.num_hidden_layers} cannot be split over pipeline parallel {pipeline} (pp_size)",
            why="every stage needs at least one layer",
            next=f"set parallel.pipeline to at most {shape.num_hidden_layers}",
        )


def check_expressible(shape: ModelShape) -> None:
    """Refuse a model that TensorRT-LLM's class of its family cannot compute.

    Raises:
        SourceError: names what, and the backends that can.
    """
    found = _family(shape).misfit(shape)
    if found is not None:
        raise SourceError(found[0], why=found[1], next="set backend to pytorch or vllm, which run the model as it is")


def stage_layers(num_hidden_layers: int, pipeline: int) -> list[range]:
    """Layers of each pipeline stage: the first `layers % pipeline` stages get one more (TensorRT-LLM 1.x)."""
    base, extra = divmod(num_hidden_layers, pipeline)
    stages: list[range] = []
    begin = 0
    for stage in range(pipeline):
        end = begin + base + (stage < extra)
        stages.append(range(begin, end))
        begin = end
    return stages
