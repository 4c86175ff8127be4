"""Sizes that the quantized kernels of TensorRT-LLM can take, checked before any weight is read."""

from __future__ import annotations

from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape, tensor_parallel_sizes
from lpxbuild.quantization.formats import FORMATS

WEIGHT_ONLY_MULTIPLE = 64


def _kernel_sizes(shape: ModelShape, tensor: int) -> dict[str, int]:
    """Feature counts of the quantized linears over all ranks, copies of KV heads included, by their config keys."""
    key_value_heads = max(shape.num_key_value_heads, tensor)
    return {
        "hidden_size": shape.hidden_size,
        "num_attention_heads × head_dim": shape.num_attention_heads * shape.head_size,
        "(num_attention_heads + 2 × num_key_value_heads) × head_dim": (
            (shape.num_attention_heads + 2 * key_value_heads) * shape.head_size
        ),
        "intermediate_size": shape.intermediate_size,
    }


def _misfit(shape: ModelShape, tensor: int) -> tuple[str, int] | None:
    for key, value in _kernel_sizes(shape, tensor).items():
        if value % (WEIGHT_ONLY_MULTIPLE * tensor):
            return key, value
    return None


def check_shapes(shape: ModelShape, quantization_format: str, tensor_parallel: int) -> None:
    """Refuse sizes that the kernels of a weight-only format cannot take.

    TensorRT-LLM's weight-only linears round in and out features up to multiples of 64 × ranks, but its builder does
    not pad the tensors, so other sizes end in a shape error on the GPU host. `openvino` refuses the same, because a
    rehearsal must not pass what the GPU host would fail.

    Raises:
        SourceError: names the size, its value, the ranks, and what would work.
    """
    row = FORMATS[quantization_format]
    if row.quant_algo not in ("W8A16", "W4A16"):
        return
    misfit = _misfit(shape, tensor_parallel)
    if misfit is None:
        return
    key, value = misfit
    working = [size for size in tensor_parallel_sizes(shape) if _misfit(shape, size) is None]
    raise SourceError(
        f"{key} {value} does not fit {quantization_format} with tensor parallel {tensor_parallel} (tp_size)",
        why=f"the {row.quant_algo} kernels need a multiple of {WEIGHT_ONLY_MULTIPLE} × {tensor_parallel} = "
        f"{WEIGHT_ONLY_MULTIPLE * tensor_parallel}",
        next=f"set parallel.tensor to one of: {', '.join(map(str, working))}, or quantization.format to none"
        if working
        else "set quantization.format to none: no tensor parallel size of this model fits",
    )
