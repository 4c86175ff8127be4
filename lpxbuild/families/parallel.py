"""Which tensor × pipeline splits a model allows."""

from __future__ import annotations

from math import gcd, isqrt

from lpxbuild.errors import SourceError
from lpxbuild.families.shape import ModelShape


def _misfit(shape: ModelShape, tensor: int) -> tuple[str, int, str] | None:
    """The first config key that does not allow `tensor` ranks: (key, value, reason)."""
    if shape.num_attention_heads % tensor:
        return "num_attention_heads", shape.num_attention_heads, "every rank takes the same number of heads"
    if shape.num_key_value_heads % tensor and tensor % shape.num_key_value_heads:
        return (
            "num_key_value_heads",
            shape.num_key_value_heads,
            "KV heads are either shared out evenly or copied evenly over the ranks",
        )
    if shape.intermediate_size % tensor:
        return "intermediate_size", shape.intermediate_size, "every rank takes the same number of MLP columns"
    return None


def tensor_parallel_sizes(shape: ModelShape) -> tuple[int, ...]:
    """All tensor-parallel sizes that fit, ascending."""
    common = gcd(shape.num_attention_heads, shape.intermediate_size)
    small = [size for size in range(1, isqrt(common) + 1) if common % size == 0]
    return tuple(size for size in sorted({*small, *(common // size for size in small)}) if _misfit(shape, size) is None)


def check_parallel(shape: ModelShape, tensor: int, pipeline: int) -> None:
    """Refuse a split that the sizes do not allow.

    Raises:
        SourceError: names the config key, its value, the size asked for and the sizes that work.
    """
    misfit = _misfit(shape, tensor)
    if misfit is not None:
        key, value, reason = misfit
        sizes = ", ".join(map(str, tensor_parallel_sizes(shape)))
        raise SourceError(
            f"{key} {value} cannot be split over tensor parallel {tensor} (tp_size)",
            why=reason,
            next=f"set parallel.tensor to one of: {sizes}",
        )
    if pipeline > shape.num_hidden_layers:
        raise SourceError(
            f"num_hidden_layers {shape.num_hidden_layers} cannot be split over pipeline parallel {pipeline} (pp_size)",
            why="every stage needs at least one layer",
            next=f"set parallel.pipeline to at most {shape.num_hidden_layers}",
        )


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
