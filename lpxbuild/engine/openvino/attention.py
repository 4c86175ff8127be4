"""Attention of one layer: projections, head norms, rotary positions, the KV cache, scores."""

from __future__ import annotations

from typing import Any

from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.inputs import Inputs
from lpxbuild.engine.openvino.linears import Linears
from lpxbuild.engine.openvino.masks import Masks
from lpxbuild.engine.openvino.nodes import integer, integers, number, point, soft_capped
from lpxbuild.engine.openvino.norms import normed
from lpxbuild.engine.openvino.rotary import Rotary
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.families import ModelShape


class Attention:
    """Builds the attention of every layer.

    Attributes:
        masks, rotary: replaceable; how a mask is written decides whether the paged transformation understands it.
        sinks: the assignments of the KV cache, part of the model.
    """

    def __init__(
        self, shape: ModelShape, weights: MergedWeights, constants: Constants, linears: Linears, inputs: Inputs
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._constants = constants
        self._linears = linears
        self._inputs = inputs
        self._scale = shape.head_size**-0.5 if shape.attention_scale is None else shape.attention_scale
        self.masks = Masks(shape, inputs)
        self.rotary = Rotary(shape, inputs)
        self.sinks: list[Any] = []

    def __call__(self, layer: int, hidden: Any) -> Any:
        """[batch, tokens, hidden_size] of the norm before it -> the same, without the residual."""
        from openvino import opset13 as op

        shape = self._shape
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        norms = ("attention.q_layernorm", "attention.k_layernorm", None)
        matrices = self._weights.qkv(layer)
        biases = self._weights.qkv_bias(layer) or (None, None, None)
        projected = []
        for part, matrix, bias, count, norm in zip("qkv", matrices, biases, heads, norms):
            value = point(self._linears.apply(hidden, matrix, bias), f"layers.{layer}.attention.{part}")
            value = op.reshape(value, integers(0, 0, count, shape.head_size), True)
            if norm is not None and shape.qk_norm:
                value = self._norm(layer, norm, value)
            projected.append(op.transpose(value, integers(0, 2, 1, 3)))
        query, key, value = projected
        if shape.position == "rope":
            query, key = self.rotary.rotate(layer, query), self.rotary.rotate(layer, key)
        key = self._repeated(self._cached(key, f"past_key_values.{layer}.keypresent.{layer}.key"))
        value = self._repeated(self._cached(value, f"past_key_values.{layer}.valuepresent.{layer}.value"))
        attended = op.transpose(self.attend(layer, query, key, value), integers(0, 2, 1, 3))
        size = shape.num_attention_heads * shape.head_size
        attended = point(op.reshape(attended, integers(0, 0, size), True), f"layers.{layer}.attention.context")
        # The bias of a row-parallel layer lies whole on every rank and is added once.
        bias = self._weights.whole(layer, "attention.dense.bias") if shape.dense_bias else None
        dense = self._linears.apply(attended, self._weights.row_parallel(layer, "attention.dense", size), bias)
        return point(dense, f"layers.{layer}.attention.dense")

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """Scaled dot product of [batch, heads, tokens, head_size] under the layer's mask."""
        from openvino import opset13 as op

        mask = self.masks.of_layer(layer)
        if self._shape.attn_softcap is None:
            return op.scaled_dot_product_attention(query, key, value, mask, number(self._scale), causal=False)
        scores = op.multiply(op.matmul(query, key, False, True), number(self._scale))
        scores = op.add(soft_capped(scores, self._shape.attn_softcap), mask)
        return op.matmul(op.softmax(scores, -1), value, False, False)

    def _norm(self, layer: int, name: str, value: Any) -> Any:
        weight = self._weights.required(layer, f"{name}.weight")
        return normed(value, weight, None, kind="rms", epsilon=self._shape.norm_epsilon, constants=self._constants)

    def _cached(self, value: Any, name: str) -> Any:
        from openvino import Dimension, PartialShape, Type
        from openvino import opset13 as op
        from openvino.op.util import Variable, VariableInfo

        heads, size = self._shape.num_key_value_heads, self._shape.head_size
        info = VariableInfo()
        info.data_shape = PartialShape([Dimension(), heads, Dimension(), size])
        info.data_type = Type.f32
        info.variable_id = name
        variable = Variable(info)
        empty_shape = op.concat([self._inputs.batch, integers(heads, 0, size)], 0)
        past = op.read_value(op.broadcast(number(0.0), empty_shape), variable)
        joined = op.concat([op.gather(past, self._inputs.beam_idx, integer(0)), value], 2)
        self.sinks.append(op.assign(joined, variable))
        return joined

    def _repeated(self, value: Any) -> Any:
        """Each KV head beside itself, once for every query head that it serves."""
        from openvino import opset13 as op

        heads, kv_heads = self._shape.num_attention_heads, self._shape.num_key_value_heads
        if heads == kv_heads:
            return value
        shape = op.shape_of(value)
        outer, inner = op.gather(shape, integers(0, 1), integer(0)), op.gather(shape, integers(2, 3), integer(0))
        target = op.concat([outer, integers(heads // kv_heads), inner], 0)
        repeated = op.broadcast(op.unsqueeze(value, integer(2)), target, "BIDIRECTIONAL")
        return op.reshape(repeated, integers(0, heads, -1, self._shape.head_size), True)
