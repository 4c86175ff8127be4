"""TensorRT-LLM's weight-only quantization (W8A16, W4A16), as its builder applies it to plain weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def quantize(weight: npt.NDArray[Any], bits: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Symmetric rounding per output channel: the rule of TensorRT-LLM's `symmetric_quantize`
    (cpp/tensorrt_llm/kernels/cutlass_kernels/cutlass_preprocessors.cpp, 0.16 to 1.2).

    scale[o] = max|W[o, :]| · 2^-(bits-1) in float32; q = W / scale in float32, rounded half away from zero (C's
    `round`), clamped to [-2^(bits-1), 2^(bits-1) - 1]; a row of zeros has scale 0 and q 0. The division uses the
    float32 scale; what the kernel multiplies with is that scale *rounded to the model's dtype*, and that is returned.

    The builder quantizes each rank's file by itself: the shards of a row-parallel weight have their own scales, so
    call this with what one rank holds.

    Args:
        weight: (out, in) in the model's dtype (float16, ml_dtypes.bfloat16 or float32).
        bits: 8 or 4.

    Returns:
        q (out, in) int8, and scale (out,) float32 with the values of the model's dtype. W ≈ q · scale[:, None].
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}; weight-only quantization has 8 and 4")
    limit = 1 << (bits - 1)
    quantized = np.empty(weight.shape, np.int8)
    scales = np.empty(weight.shape[0], np.float32)
    rows = max(1, (1 << 20) // max(1, weight.shape[1]))
    for begin in range(0, weight.shape[0], rows):
        block = weight[begin : begin + rows].astype(np.float32)
        scale = np.abs(block).max(axis=1, initial=0.0) * np.float32(1.0 / limit)
        divisor = np.where(scale == 0, np.float32(1), scale)
        block /= divisor[:, None]
        whole = np.trunc(block)
        away = np.abs(block - whole) >= 0.5
        whole += np.copysign(away, block)
        quantized[begin : begin + rows] = np.clip(whole, -limit, limit - 1)
        scales[begin : begin + rows] = scale.astype(weight.dtype).astype(np.float32)
    return quantized, scales
