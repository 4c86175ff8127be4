"""What a query may see: causal, a sliding window, and ALiBi's bias by distance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.inputs import Inputs
from lpxbuild.engine.openvino.nodes import integer, integers, number, numbers
from lpxbuild.families import ModelShape

if TYPE_CHECKING:
    import numpy.typing as npt

_HIDDEN = -3.4028234663852886e38  # the lowest float32


def window_of_layer(shape: ModelShape, layer: int) -> int | None:
    """Positions that a token of this layer sees, itself included; None = all."""
    if shape.sliding_window is None or (
        shape.layer_types is not None and shape.layer_types[layer] != "sliding_attention"
    ):
        return None
    return shape.sliding_window


class Masks:
    """Makes each mask of a model once."""

    def __init__(self, shape: ModelShape, inputs: Inputs) -> None:
        self._shape = shape
        self._inputs = inputs
        self._made: dict[int | None, Any] = {}

    def of_layer(self, layer: int) -> Any:
        """Added to the scores of a layer: [batch, 1, tokens, past + tokens], with ALiBi [batch, heads, …]."""
        window = window_of_layer(self._shape, layer)
        if window not in self._made:
            self._made[window] = self.make(window)
        return self._made[window]

    def make(self, window: int | None) -> Any:
        """0 (or ALiBi's bias) where a query may look, the lowest float32 where not.

        The chain of BitwiseAnd over Greater(key, query - window) is the form in which the paged-attention
        transformation finds a window (its source knows it from gpt-oss) and hands it to the kernel; written
        otherwise, a window is dropped without a word.
        """
        from openvino import opset13 as op

        inputs = self._inputs
        query, key, present = self.positions()
        causal = op.less_equal(key, query)
        if window is None:
            seen = op.bitwise_and(causal, present)
        else:
            inside = op.greater(key, op.add(query, integer(-window)))
            seen = op.bitwise_and(causal, inside)
            seen = op.bitwise_and(seen, present)
            seen = op.bitwise_and(causal, seen)
            seen = op.bitwise_and(seen, present)
        sizes = [op.unsqueeze(size, integer(0)) for size in (integer(1), inputs.tokens, inputs.total)]
        seen = op.broadcast(seen, op.concat([inputs.batch, *sizes], 0))
        if self._shape.position == "alibi":
            return op.select(seen, self.alibi(key), number(_HIDDEN))
        mask = op.select(seen, number(0.0), number(_HIDDEN))
        return op.slice(mask, integers(0), op.unsqueeze(inputs.total, integer(0)), integers(1), integers(3))

    def positions(self) -> tuple[Any, Any, Any]:
        """Positions of the queries [1, 1, tokens, 1] and keys [1, 1, 1, total], and which keys are no padding."""
        from openvino import Type
        from openvino import opset13 as op

        tokens, total = self._inputs.tokens, self._inputs.total
        query = op.range(op.subtract(total, tokens), total, integer(1), Type.i64)
        key = op.range(integer(0), total, integer(1), Type.i64)
        present = op.not_equal(op.unsqueeze(self._inputs.attention_mask, integers(1, 2)), integer(0))
        return op.unsqueeze(query, integers(0, 1, 3)), op.unsqueeze(key, integers(0, 1, 2)), present

    def alibi(self, key: Any) -> Any:
        """slope · key position / sqrt(head_size), [1, heads, 1, past + tokens].

        As transformers computes it for Falcon, in bfloat16 whatever the model's type: slope, position and product are
        each rounded to 8 bits. (Subtracting the query's position would change nothing but that rounding.)
        """
        from openvino import Type
        from openvino import opset13 as op

        slopes = alibi_slopes(self._shape.num_attention_heads)
        positions = _as_bfloat16(op.convert(key, Type.f32))
        bias = _as_bfloat16(op.multiply(numbers(slopes.reshape(1, -1, 1, 1)), positions))
        return op.divide(bias, number(math.sqrt(self._shape.head_size)))


def alibi_slopes(heads: int) -> npt.NDArray[Any]:
    """Slopes of the heads, float32 with bfloat16 values, [heads] (Press et al. 2022; heads that are no power of two
    get every other slope of the next one)."""
    import ml_dtypes
    import numpy as np

    power = 2 ** math.floor(math.log2(heads))
    slopes = [np.float32(2 ** -(2 ** -(math.log2(power) - 3))) ** np.float32(n) for n in range(1, power + 1)]
    base = np.float32(2 ** -(2 ** -(math.log2(2 * power) - 3)))
    slopes += [base ** np.float32(n) for n in range(1, 2 * (heads - power) + 1, 2)]
    return np.array(slopes, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def _as_bfloat16(value: Any) -> Any:
    """Rounded to 8 significant bits, ties to even, by Veltkamp's split: OpenVINO drops a pair of conversions."""
    from openvino import opset13 as op

    large = op.multiply(value, number(65537.0))
    return op.subtract(large, op.subtract(large, value))
