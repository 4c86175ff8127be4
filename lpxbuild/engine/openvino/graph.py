"""A stateful decoder graph, op by op, in the form that OpenVINO's paged-attention transformation recognises.

Inputs: input_ids, attention_mask, position_ids (i64 [batch, tokens]) and beam_idx (i32 [batch]); output: logits
(f32 [batch, tokens, vocab_size]). The KV cache is a pair of variables per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.attention import Attention
from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.inputs import Inputs
from lpxbuild.engine.openvino.linears import Linears
from lpxbuild.engine.openvino.mlp import ACTIVATIONS, Mlp
from lpxbuild.engine.openvino.moe import Experts
from lpxbuild.engine.openvino.nodes import integer, number, point, scaled, soft_capped
from lpxbuild.engine.openvino.norms import normed
from lpxbuild.engine.openvino.weights import MergedWeights, missing
from lpxbuild.errors import SourceError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class DecoderGraph:
    """Builds one model. Keep the object until the model is saved: it owns the constants.

    Attributes:
        attention: the part that its kinds differ in.
        forms: how the linear layers' weights are kept, by format; complete after `model`.
    """

    def __init__(self, weights: MergedWeights, *, int8: bool = False) -> None:
        """`int8`: unquantized weights become int8 per channel (precision "fast")."""
        shape = weights.shape
        if shape.hidden_act not in ACTIVATIONS:
            raise SourceError(
                f"hidden_act is {shape.hidden_act!r}, which the openvino engine does not execute",
                why=f"it executes {', '.join(ACTIVATIONS)}",
                next="use a model with one of these",
            )
        self.shape = shape
        self.weights = weights
        self.constants = Constants(weights)
        self.linears = Linears(weights, self.constants, int8=int8)
        self.inputs = Inputs()
        self.attention = Attention(shape, weights, self.constants, self.linears, self.inputs)
        self.mlp = Mlp(shape, weights, self.linears)
        self.experts = None if shape.moe is None else Experts(shape.moe, weights, self.constants, self.mlp)

    @property
    def forms(self) -> dict[str, str]:
        return dict(sorted(self.linears.forms.items()))

    def model(self) -> Any:
        """The `openvino.Model`."""
        import openvino as ov
        from openvino import opset13 as op

        embedding, head = self.weights.embedding(), self.weights.lm_head()
        table = self.linears.table(embedding)
        hidden = point(self._embedded(table), "embedding")
        for layer in range(self.shape.num_hidden_layers):
            hidden = point(self._layer(layer, hidden), f"layers.{layer}")
        weight = self.weights.final("ln_f.weight")
        if weight is None:
            raise missing("transformer.ln_f.weight")
        hidden = point(self._normed(hidden, weight, self.weights.final("ln_f.bias")), "ln_f")
        head_node = table if _same(embedding, head) else self.linears.table(head)
        logits = op.matmul(hidden, head_node, False, True)
        if self.shape.logits_divisor != 1.0:
            logits = op.divide(logits, number(self.shape.logits_divisor))
        result = op.result(soft_capped(logits, self.shape.final_softcap), name="logits")
        result.output(0).set_names({"logits"})
        return ov.Model([result], self.attention.sinks, self.inputs.all(), "lpx")

    def _embedded(self, table: Any) -> Any:
        from openvino import Type
        from openvino import opset13 as op

        hidden = op.gather(table, op.convert(self.inputs.input_ids, Type.i32), integer(0))
        hidden = scaled(hidden, self.shape.embedding_multiplier)
        if self.shape.position == "learned":
            positions = op.convert(self.inputs.position_ids, Type.i32)
            learned = op.gather(self.constants.exact(self.weights.positions()), positions, integer(0))
            hidden = op.add(hidden, learned)
        return hidden

    def _layer(self, layer: int, hidden: Any) -> Any:
        from openvino import opset13 as op

        shape = self.shape
        before = point(self._norm(layer, "input_layernorm", hidden), f"layers.{layer}.input_layernorm")
        attended = self.attention(layer, before)
        if shape.parallel_attention:
            if shape.num_ln_in_parallel_attn == 2:
                before = self._before_mlp(layer, "mlp_layernorm", hidden)
            return op.add(hidden, op.add(self._mlp(layer, before), attended))
        if shape.sandwich_norms:
            hidden = op.add(hidden, self._norm(layer, "post_layernorm", attended))
            before = self._before_mlp(layer, "pre_feedforward_layernorm", hidden)
            return op.add(hidden, self._norm(layer, "post_feedforward_layernorm", self._mlp(layer, before)))
        hidden = op.add(hidden, scaled(attended, shape.residual_multiplier))
        before = self._before_mlp(layer, "post_layernorm", hidden)
        return op.add(hidden, scaled(self._mlp(layer, before), shape.residual_multiplier))

    def _mlp(self, layer: int, hidden: Any) -> Any:
        if self.experts is None or (self.shape.moe is not None and layer in self.shape.moe.dense_layers):
            return point(self.mlp(layer, hidden), f"layers.{layer}.mlp")
        return point(self.experts(layer, hidden), f"layers.{layer}.mlp")

    def _before_mlp(self, layer: int, name: str, hidden: Any) -> Any:
        return point(self._norm(layer, name, hidden), f"layers.{layer}.post_layernorm")

    def _norm(self, layer: int, name: str, hidden: Any) -> Any:
        weight = self.weights.required(layer, f"{name}.weight")
        bias = self.weights.required(layer, f"{name}.bias") if self.shape.norm == "layer" else None
        return self._normed(hidden, weight, bias)

    def _normed(self, hidden: Any, weight: Array, bias: Array | None) -> Any:
        epsilon = self.shape.norm_epsilon
        return normed(hidden, weight, bias, kind=self.shape.norm, epsilon=epsilon, constants=self.constants)


def _same(left: Array, right: Array) -> bool:
    """Equal values, compared in pieces."""
    import numpy as np

    if left.shape != right.shape:
        return False
    step = 4096
    return left is right or all(
        np.array_equal(left[start : start + step], right[start : start + step]) for start in range(0, len(left), step)
    )
