"""The dense MLP of one layer: gated (mlp.fc, mlp.gate), fused (one mlp.fc = [up; gate]), or plain."""

from __future__ import annotations

from typing import Any

from lpxbuild.engine.openvino.linears import Linears
from lpxbuild.engine.openvino.nodes import point
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.families import ModelShape

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def activated(kind: str, value: Any) -> Any:
    """silu, gelu (by the error function), gelu_tanh, relu."""
    from openvino import opset13 as op

    if kind == "silu":
        return op.swish(value)
    if kind == "relu":
        return op.relu(value)
    return op.gelu(value, "ERF" if kind == "gelu" else "TANH")


class Mlp:
    """Builds the dense MLP of every layer."""

    def __init__(self, shape: ModelShape, weights: MergedWeights, linears: Linears) -> None:
        self._shape = shape
        self._weights = weights
        self._linears = linears

    def __call__(self, layer: int, hidden: Any) -> Any:
        return self.gated(layer, "mlp", hidden, self._shape.intermediate_size, kind=self._shape.mlp, points=True)

    def gated(
        self,
        layer: int,
        module: str,
        hidden: Any,
        size: int,
        *,
        kind: str,
        expert: int = 0,
        bias: bool | None = None,
        points: bool = False,
    ) -> Any:
        """An MLP of the inner size `size` whose tensors are `module`.fc and so on; TensorRT-LLM's fc is HF's
        gate_proj in a gated one, and of a fused one the second half is activated."""
        from openvino import opset13 as op

        has_bias = self._shape.mlp_bias if bias is None else bias
        weights, linears = self._weights, self._linears

        def rows(name: str, *, halves: int = 1, half: int = 0) -> Any:
            full = f"{module}.{name}"
            matrix = weights.column_parallel(layer, full, size, halves=halves, half=half, expert=expert)
            part = half if halves == 2 else None
            return linears.apply(
                hidden, matrix, weights.by_rows(layer, f"{full}.bias", half=part) if has_bias else None
            )

        def named(value: Any, part: str) -> Any:
            return point(value, f"layers.{layer}.{module}.{part}") if points else value

        if kind == "plain":
            inner = activated(self._shape.hidden_act, named(rows("fc"), "fc"))
        elif kind == "fused":
            up, gate = named(rows("fc", halves=2, half=0), "up"), named(rows("fc", halves=2, half=1), "gate")
            inner = op.multiply(up, activated(self._shape.hidden_act, gate))
        else:
            gate, up = named(rows("fc"), "gate"), named(rows("gate"), "up")
            inner = op.multiply(activated(self._shape.hidden_act, gate), up)
        inner = named(inner, "inner")
        matrix = weights.row_parallel(layer, f"{module}.proj", size, expert=expert)
        # The bias of a row-parallel layer lies whole on every rank and is added once.
        return linears.apply(inner, matrix, weights.whole(layer, f"{module}.proj.bias") if has_bias else None)
