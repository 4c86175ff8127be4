"""Small constants and parameters of a graph."""

from __future__ import annotations

from typing import Any


def integer(value: int) -> Any:
    """An i64 scalar."""
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(value, np.int64))


def integers(*values: int) -> Any:
    """An i64 vector."""
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(values, np.int64))


def number(value: float) -> Any:
    """A float32 scalar."""
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(value, np.float32))


def numbers(array: Any) -> Any:
    """A float32 constant of the array's shape, copied into the graph: for small tables."""
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.ascontiguousarray(array, dtype=np.float32))


def parameter(name: str, element_type: Any, rank: int) -> Any:
    """An input of the model with every size open."""
    from openvino import Dimension, PartialShape
    from openvino import opset13 as op

    node = op.parameter(PartialShape([Dimension()] * rank), element_type, name=name)
    node.output(0).set_names({name})
    return node


def point(value: Any, name: str) -> Any:
    """The value, findable in the saved model by the tensor name "lpx/NAME": where `lpx verify` looks into the graph."""
    value.output(0).add_names({f"lpx/{name}"})
    return value


def scaled(value: Any, factor: float) -> Any:
    """value × factor; the value itself where the factor is 1."""
    from openvino import opset13 as op

    return value if factor == 1.0 else op.multiply(value, number(factor))


def soft_capped(value: Any, cap: float | None) -> Any:
    """cap · tanh(value / cap); the value itself without a cap."""
    from openvino import opset13 as op

    if cap is None:
        return value
    return op.multiply(op.tanh(op.divide(value, number(cap))), number(cap))


def size_of(value: Any, axis: int) -> Any:
    """The i64 scalar of one dimension of a node."""
    from openvino import opset13 as op

    return op.gather(op.shape_of(value), integer(axis), integer(0))
