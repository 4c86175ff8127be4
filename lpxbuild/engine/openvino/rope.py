"""Rotary frequencies with transformers' float32 arithmetic, so that long positions give the same angles.

Formulas: `transformers/modeling_rope_utils.py` (default, linear, llama3, yarn, longrope). The scaling dict is HF's
`rope_scaling` with every number spelled out, its kind under `rope_type` or, as TensorRT-LLM writes it, `type`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Frequencies = npt.NDArray[np.float32]


def frequencies(
    head_size: int, base: float, scaling: Mapping[str, Any] | None, max_position_embeddings: int
) -> tuple[Frequencies, float]:
    """Inverse frequencies [head_size / 2] and the factor on cos and sin.

    `head_size` counts the dimensions that are turned. Of longrope these are the short factors, which hold for
    sequences up to the original length; a longer one is refused before (attention feature "long_rope").

    Raises:
        SourceError: the kind of scaling is not one of those above.
    """
    import numpy as np

    # torch: float32 exponent, float32 power, float32 reciprocal; the power is rounded once from float64.
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    powers = np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    kind = "default" if not scaling else str(scaling.get("type") or scaling.get("rope_type"))
    # Dynamic scaling begins beyond the model's length, which the attention feature "long_rope" stands for.
    if not scaling or kind in ("default", "dynamic"):
        return np.float32(1.0) / powers, 1.0
    try:
        scale = _KINDS[kind]
    except KeyError:
        raise SourceError(
            f"rotary_scaling type {kind!r} is not supported by the openvino engine",
            why=f"it computes default, {', '.join(_KINDS)}",
            next="use a checkpoint with one of these kinds",
        ) from None
    return scale(powers, head_size, base, scaling, max_position_embeddings)


def _linear(
    powers: Frequencies, head_size: int, base: float, scaling: Mapping[str, Any], positions: int
) -> tuple[Frequencies, float]:
    import numpy as np

    return (np.float32(1.0) / powers) / np.float32(scaling["factor"]), 1.0


def _llama3(
    powers: Frequencies, head_size: int, base: float, scaling: Mapping[str, Any], positions: int
) -> tuple[Frequencies, float]:
    import numpy as np

    inverse = np.float32(1.0) / powers
    factor = np.float32(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = scaling["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / inverse
    is_long = wavelength > np.float32(original / low)
    is_short = wavelength < np.float32(original / high)
    scaled = np.where(is_long, inverse / factor, inverse)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    smoothed = (np.float32(1) - smooth) * scaled / factor + smooth * scaled
    return np.where(~is_short & ~is_long, smoothed, scaled).astype(np.float32), 1.0


def _yarn(
    powers: Frequencies, head_size: int, base: float, scaling: Mapping[str, Any], positions: int
) -> tuple[Frequencies, float]:
    import numpy as np

    factor = float(scaling["factor"])
    original = scaling.get("original_max_position_embeddings") or positions

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def correction(rotations: float) -> float:
        return head_size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        # As TensorRT-LLM: the checkpoint spells out both numbers, and 0 is a number (`families.rope` writes an explicit
        # attention factor as mscale with mscale_all_dim 0).
        mscale, mscale_all_dim = scaling.get("mscale", 1.0), scaling.get("mscale_all_dim", 0.0)
        attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
    low, high = correction(scaling.get("beta_fast") or 32), correction(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_size // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), np.float32(0), np.float32(1))
    extrapolated = np.float32(1) - ramp
    inverse = (np.float32(1) / (np.float32(factor) * powers)) * (np.float32(1) - extrapolated)
    inverse += (np.float32(1) / powers) * extrapolated
    return inverse.astype(np.float32), float(attention_factor)


def _longrope(
    powers: Frequencies, head_size: int, base: float, scaling: Mapping[str, Any], positions: int
) -> tuple[Frequencies, float]:
    import numpy as np

    factors = np.array(scaling["short_factor"], np.float32)
    return np.float32(1.0) / (factors * powers), float(scaling["attention_factor"])


_KINDS: dict[str, Callable[[Frequencies, int, float, Mapping[str, Any], int], tuple[Frequencies, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
