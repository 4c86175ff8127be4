"""The sparse MLP of one layer: a router, experts that get only their own tokens, and a shared expert.

One matrix product per expert: the CPU plugin has no product with a three-dimensional constant.
"""

from __future__ import annotations

from typing import Any

from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.mlp import Mlp
from lpxbuild.engine.openvino.nodes import integer, integers, number, point
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.families.shape import MixtureOfExperts


class Experts:
    """Builds the sparse MLP of every layer that has one."""

    def __init__(self, moe: MixtureOfExperts, weights: MergedWeights, constants: Constants, mlp: Mlp) -> None:
        self._moe = moe
        self._weights = weights
        self._constants = constants
        self._mlp = mlp

    def __call__(self, layer: int, hidden: Any) -> Any:
        from openvino import opset13 as op

        moe = self._moe
        features = self._weights.shape.hidden_size
        flat = op.reshape(hidden, integers(-1, features), False)
        shares = self._shares(layer, flat)
        # Tokens without a share in an expert are not computed; each expert adds to the rows of its own.
        total = op.broadcast(number(0.0), op.shape_of(flat))
        for expert in range(moe.num_experts):
            share = op.gather(shares, integer(expert), integer(1))
            rows = op.squeeze(op.non_zero(share, "i64"), integer(0))
            answer = self._mlp.gated(
                layer,
                "mlp",
                op.gather(flat, rows, integer(0)),
                moe.intermediate_size,
                kind="fused",
                expert=expert,
                bias=False,
            )
            answer = op.multiply(answer, op.unsqueeze(op.gather(share, rows, integer(0)), integer(1)))
            places = op.broadcast(op.unsqueeze(rows, integer(1)), op.shape_of(answer))
            total = op.scatter_elements_update(total, places, answer, integer(0), "sum", True)
        if moe.shared_intermediate_size:
            total = op.add(total, self._shared(layer, flat))
        return op.reshape(total, op.shape_of(hidden), False)

    def _shares(self, layer: int, flat: Any) -> Any:
        """[tokens, experts]: softmax in float32, the top k of it (divided by their sum where the model says so),
        0 elsewhere."""
        from openvino import opset13 as op

        router = self._constants.exact(self._weights.required(layer, "mlp.router.weight"))
        scores = point(op.matmul(flat, router, False, True), f"layers.{layer}.mlp.router")
        probabilities = op.softmax(scores, 1)
        top = op.topk(probabilities, integer(self._moe.top_k), 1, "max", "value", "i64")
        chosen = top.output(0)
        if self._moe.renormalize:
            chosen = op.divide(chosen, op.reduce_sum(chosen, integers(1), True))
        zeros = op.broadcast(number(0.0), op.shape_of(probabilities))
        return op.scatter_elements_update(zeros, top.output(1), chosen, integer(1))

    def _shared(self, layer: int, flat: Any) -> Any:
        """The expert of every token, behind a sigmoid gate of its own."""
        from openvino import opset13 as op

        gate = self._constants.exact(self._weights.required(layer, "mlp.shared_expert_gate.weight"))
        answer = self._mlp.gated(
            layer, "mlp.shared_expert", flat, self._moe.shared_intermediate_size, kind="fused", bias=False
        )
        return op.multiply(op.sigmoid(op.matmul(flat, gate, False, True)), answer)
