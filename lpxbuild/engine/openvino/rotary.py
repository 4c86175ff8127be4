"""Rotary positions of a graph: cos and sin of each layer's base, and the turn itself."""

from __future__ import annotations

from typing import Any

from lpxbuild.engine.openvino.inputs import Inputs
from lpxbuild.engine.openvino.nodes import integer, integers, number, numbers, scaled
from lpxbuild.engine.openvino.rope import frequencies
from lpxbuild.families import ModelShape


class Rotary:
    """RoPE on the first `rotary_pct` of each head; halves paired as transformers does (rotate_half)."""

    def __init__(self, shape: ModelShape, inputs: Inputs) -> None:
        self._shape = shape
        self._positions = inputs.position_ids
        self.turned = int(shape.head_size * shape.rotary_pct)
        self._tables: dict[bool, tuple[Any, Any]] = {}

    def rotate(self, layer: int, value: Any) -> Any:
        """[batch, heads, tokens, head_size], turned by the position of each token."""
        from openvino import opset13 as op

        cos, sin = self._table(self.is_local(layer))
        if self.turned == self._shape.head_size:
            return _turn(value, self.turned, cos, sin)
        split = op.variadic_split(value, integer(-1), integers(self.turned, self._shape.head_size - self.turned))
        return op.concat([_turn(split.output(0), self.turned, cos, sin), split.output(1)], -1)

    def is_local(self, layer: int) -> bool:
        """Whether the layer turns by `rotary_local_base` (Gemma 3's layers with a window)."""
        types = self._shape.layer_types
        return self._shape.rotary_local_base is not None and (types is None or types[layer] == "sliding_attention")

    def _table(self, local: bool) -> tuple[Any, Any]:
        from openvino import Type
        from openvino import opset13 as op

        if local in self._tables:
            return self._tables[local]
        base = self._shape.rotary_local_base if local else None
        inverse, factor = frequencies(
            self.turned,
            self._shape.rotary_base if base is None else base,
            None if local else self._shape.rotary_scaling,
            self._shape.max_position_embeddings,
        )
        positions = op.convert(op.unsqueeze(self._positions, integer(2)), Type.f32)
        angles = op.matmul(positions, numbers(inverse.reshape(1, 1, -1)), False, False)
        angles = op.unsqueeze(op.concat([angles, angles], 2), integer(1))
        self._tables[local] = scaled(op.cos(angles), factor), scaled(op.sin(angles), factor)
        return self._tables[local]


def _turn(value: Any, size: int, cos: Any, sin: Any) -> Any:
    from openvino import opset13 as op

    split = op.variadic_split(value, integer(-1), integers(size // 2, size // 2))
    rotated = op.concat([op.multiply(split.output(1), number(-1.0)), split.output(0)], -1)
    return op.add(op.multiply(value, cos), op.multiply(rotated, sin))
