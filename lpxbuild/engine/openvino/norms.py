"""RMS norm and LayerNorm over the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.nodes import integers, number

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


def normed(hidden: Any, weight: Array, bias: Array | None, *, kind: str, epsilon: float, constants: Constants) -> Any:
    """`kind` "rms" (transformers: float32, the weight last) or "layer" (LayerNorm, biased variance)."""
    from openvino import opset13 as op

    shape = (1,) * (hidden.get_output_partial_shape(0).rank.get_length() - 1) + (-1,)
    if kind == "layer":
        centred = op.mvn(hidden, integers(-1), True, epsilon, "INSIDE_SQRT")
        result = op.multiply(centred, constants.vector(weight, *shape))
    else:
        variance = op.reduce_mean(op.power(hidden, number(2.0)), integers(-1), True)
        root = op.sqrt(op.add(variance, number(epsilon)))
        result = op.multiply(constants.vector(weight, *shape), op.multiply(hidden, op.divide(number(1.0), root)))
    return result if bias is None else op.add(result, constants.vector(bias, *shape))
