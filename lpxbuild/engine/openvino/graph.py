"""A stateful decoder graph, op by op, in the form that OpenVINO's paged-attention transformation recognises.

Inputs: input_ids, attention_mask, position_ids (i64 [batch, tokens]) and beam_idx (i32 [batch]); output: logits
(f32 [batch, tokens, vocab_size]). The KV cache is a pair of variables per layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.rope import frequencies
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.errors import SourceError

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

WeightForm = Literal["checkpoint", "int8", "int8_wo", "int4_wo"]
"""As in the checkpoint; int8 per channel (OpenVINO's own); TensorRT-LLM's weight-only rule with 8 or 4 bits."""


def build_graph(config: dict[str, Any], weights: MergedWeights, form: WeightForm) -> tuple[Any, Constants]:
    """The `openvino.Model` of a checkpoint, and the owner of its constants, to be kept until the model is saved."""
    if config["hidden_act"] != "silu":
        raise SourceError(
            f"hidden_act is {config['hidden_act']!r}, which the openvino engine does not execute",
            why="it executes silu",
            next="use a model with hidden_act silu",
        )
    builder = GraphBuilder(config, weights, form)
    return builder.model(), builder.constants


def window_of_layer(config: dict[str, Any], layer: int) -> int | None:
    """Positions that a token of this layer sees, itself included; None = all."""
    extra = config.get("lpx", {})
    window, kinds = extra.get("sliding_window"), extra.get("layer_types")
    if window is None or (kinds is not None and kinds[layer] != "sliding_attention"):
        return None
    return int(window)


class GraphBuilder:
    """Builds one model. `attend` and `rotate` are all that a kind of attention changes."""

    def __init__(self, config: dict[str, Any], weights: MergedWeights, form: WeightForm) -> None:
        from openvino import Dimension

        self.config = config
        self.weights = weights
        self.form = form
        self.constants = Constants(weights)
        self.any_size = Dimension()
        self.heads, self.kv_heads, self.head_size = weights.heads, weights.kv_heads, weights.head_size
        self.sinks: list[Any] = []
        self.masks: dict[int | None, Any] = {}

    def model(self) -> Any:
        import openvino as ov
        from openvino import Type
        from openvino import opset13 as op

        self.input_ids = self._parameter("input_ids", Type.i64, 2)
        self.attention_mask = self._parameter("attention_mask", Type.i64, 2)
        self.position_ids = self._parameter("position_ids", Type.i64, 2)
        self.beam_idx = self._parameter("beam_idx", Type.i32, 1)
        self.batch = op.gather(op.shape_of(self.input_ids), _ints(0), _int(0))
        self._rotary_tables()

        embedding = self.weights.embedding()
        head = self.weights.lm_head()
        table = self._table(embedding)
        hidden = op.gather(table, op.convert(self.input_ids, Type.i32), _int(0))
        for layer in range(self.weights.layers):
            hidden = self._layer(layer, hidden)
        hidden = self._rms_norm(hidden, self.weights.final_norm())
        head_node = table if _same(embedding, head) else self._table(head)
        result = op.result(op.matmul(hidden, head_node, False, True), name="logits")
        result.output(0).set_names({"logits"})
        parameters = [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
        return ov.Model([result], self.sinks, parameters, "lpx")

    def _layer(self, layer: int, hidden: Any) -> Any:
        from openvino import opset13 as op

        normed = self._rms_norm(hidden, self._required(layer, "input_layernorm.weight"))
        hidden = op.add(hidden, self._attention(layer, normed))
        normed = self._rms_norm(hidden, self._required(layer, "post_layernorm.weight"))
        activated = op.swish(self._rows_linear(layer, "mlp.fc", normed))
        gated = op.multiply(activated, self._rows_linear(layer, "mlp.gate", normed))
        return op.add(hidden, self._columns_linear(layer, "mlp.proj", gated))

    def _attention(self, layer: int, hidden: Any) -> Any:
        from openvino import opset13 as op

        weights = self.weights.qkv(layer, "weight")
        biases = self.weights.qkv(layer, "bias") or (None, None, None)
        if weights is None:
            raise _missing(layer, "attention.qkv.weight")
        heads = (self.heads, self.kv_heads, self.kv_heads)
        norms = (
            self.weights.whole(layer, "attention.q_layernorm.weight"),
            self.weights.whole(layer, "attention.k_layernorm.weight"),
            None,
        )
        projected = []
        for weight, bias, count, norm in zip(weights, biases, heads, norms):
            value = self._linear(hidden, self._matrix([weight], row_parallel=False), bias)
            value = op.reshape(value, _ints(0, 0, count, self.head_size), True)
            if norm is not None:
                value = self._rms_norm(value, norm)
            projected.append(op.transpose(value, _ints(0, 2, 1, 3)))
        query, key, value = self.rotate(layer, projected[0]), self.rotate(layer, projected[1]), projected[2]
        key = self._repeat_heads(self._cached(key, f"past_key_values.{layer}.keypresent.{layer}.key"))
        value = self._repeat_heads(self._cached(value, f"past_key_values.{layer}.valuepresent.{layer}.value"))
        attended = self.attend(layer, query, key, value)
        attended = op.reshape(op.transpose(attended, _ints(0, 2, 1, 3)), _ints(0, 0, self.heads * self.head_size), True)
        return self._columns_linear(layer, "attention.dense", attended)

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        """Scaled dot product of [batch, heads, tokens, head_size] under the layer's mask."""
        from openvino import opset13 as op

        mask = self.mask(window_of_layer(self.config, layer))
        return op.scaled_dot_product_attention(query, key, value, mask, _float(self.head_size**-0.5), causal=False)

    # Weights

    def _matrix(self, parts: list[Array], *, row_parallel: bool) -> Any:
        if self.form in ("int8_wo", "int4_wo"):
            return self.constants.weight_only(parts, 8 if self.form == "int8_wo" else 4, row_parallel=row_parallel)
        whole = self.weights.join_columns(parts) if row_parallel else self.weights.join_rows(parts)
        return self._table(whole)

    def _table(self, array: Array) -> Any:
        """Embedding and head, which weight-only formats leave alone, and every matrix of the other forms."""
        if self.form == "int8":
            return self.constants.int8_per_channel(array)
        return self.constants.exact(array)

    def _rows_linear(self, layer: int, name: str, hidden: Any) -> Any:
        parts = self.weights.parts(layer, f"{name}.weight")
        if not parts:
            raise _missing(layer, f"{name}.weight")
        return self._linear(
            hidden, self._matrix(parts, row_parallel=False), self.weights.by_rows(layer, f"{name}.bias")
        )

    def _columns_linear(self, layer: int, name: str, hidden: Any) -> Any:
        parts = self.weights.parts(layer, f"{name}.weight")
        if not parts:
            raise _missing(layer, f"{name}.weight")
        # The bias of a row-parallel layer lies whole on every rank and is added once.
        return self._linear(hidden, self._matrix(parts, row_parallel=True), self.weights.whole(layer, f"{name}.bias"))

    def _linear(self, hidden: Any, matrix: Any, bias: Array | None) -> Any:
        from openvino import opset13 as op

        product = op.matmul(hidden, matrix, False, True)
        return product if bias is None else op.add(product, self.constants.vector(bias, 1, 1, -1))

    def _required(self, layer: int, name: str) -> Array:
        array = self.weights.whole(layer, name)
        if array is None:
            raise _missing(layer, name)
        return array

    # Pieces of the graph

    def _rms_norm(self, hidden: Any, weight: Array) -> Any:
        from openvino import opset13 as op

        shape = (1,) * (hidden.get_output_partial_shape(0).rank.get_length() - 1) + (-1,)
        variance = op.reduce_mean(op.power(hidden, _float(2.0)), _ints(-1), True)
        root = op.sqrt(op.add(variance, _float(self.config["norm_epsilon"])))
        normed = op.multiply(hidden, op.divide(_float(1.0), root))
        return op.multiply(self.constants.vector(weight, *shape), normed)

    def _rotary_tables(self) -> None:
        import numpy as np
        from openvino import Type
        from openvino import opset13 as op

        inverse, factor = frequencies(
            self.head_size,
            float(self.config["rotary_base"]),
            self.config.get("rotary_scaling"),
            int(self.config["max_position_embeddings"]),
        )
        positions = op.convert(op.unsqueeze(self.position_ids, _int(2)), Type.f32)
        angles = op.matmul(positions, op.constant(inverse.reshape(1, 1, -1)), False, False)
        angles = op.concat([angles, angles], 2)
        self.cos, self.sin = op.unsqueeze(op.cos(angles), _int(1)), op.unsqueeze(op.sin(angles), _int(1))
        if factor != 1.0:
            scale = op.constant(np.array(factor, np.float32))
            self.cos, self.sin = op.multiply(self.cos, scale), op.multiply(self.sin, scale)

    def rotate(self, layer: int, value: Any) -> Any:
        """RoPE on [batch, heads, tokens, head_size], halves paired as transformers does (rotate_half)."""
        from openvino import opset13 as op

        half = self.head_size // 2
        split = op.variadic_split(value, _int(-1), _ints(half, half))
        rotated = op.concat([op.multiply(split.output(1), _float(-1.0)), split.output(0)], -1)
        return op.add(op.multiply(value, self.cos), op.multiply(rotated, self.sin))

    def _cached(self, value: Any, name: str) -> Any:
        from openvino import PartialShape, Type
        from openvino import opset13 as op
        from openvino.op.util import Variable, VariableInfo

        info = VariableInfo()
        info.data_shape = PartialShape([self.any_size, self.kv_heads, self.any_size, self.head_size])
        info.data_type = Type.f32
        info.variable_id = name
        variable = Variable(info)
        empty_shape = op.concat([self.batch, _ints(self.kv_heads, 0, self.head_size)], 0)
        past = op.read_value(op.broadcast(_float(0.0), empty_shape), variable)
        joined = op.concat([op.gather(past, self.beam_idx, _int(0)), value], 2)
        self.sinks.append(op.assign(joined, variable))
        return joined

    def _repeat_heads(self, value: Any) -> Any:
        from openvino import opset13 as op

        if self.heads == self.kv_heads:
            return value
        shape = op.shape_of(value)
        outer, inner = op.gather(shape, _ints(0, 1), _int(0)), op.gather(shape, _ints(2, 3), _int(0))
        target = op.concat([outer, _ints(self.heads // self.kv_heads), inner], 0)
        repeated = op.broadcast(op.unsqueeze(value, _int(2)), target, "BIDIRECTIONAL")
        return op.reshape(repeated, _ints(0, self.heads, -1, self.head_size), True)

    def mask(self, window: int | None) -> Any:
        """0 where a query may look, the lowest float32 where not: [batch, 1, tokens, past + tokens].

        The chain of BitwiseAnd over Greater(key, query - window) is the form in which the paged-attention
        transformation finds a window (its source knows it from gpt-oss) and hands it to the kernel; written
        otherwise, a window is dropped without a word.
        """
        from openvino import Type
        from openvino import opset13 as op

        if window in self.masks:
            return self.masks[window]
        tokens = op.gather(op.shape_of(self.input_ids), _int(1), _int(0))
        total = op.gather(op.shape_of(self.attention_mask), _int(1), _int(0))
        query = op.range(op.subtract(total, tokens), total, _int(1), Type.i64)
        key = op.range(_int(0), total, _int(1), Type.i64)
        query = op.unsqueeze(query, _ints(0, 1, 3))
        key = op.unsqueeze(key, _ints(0, 1, 2))
        causal = op.less_equal(key, query)
        present = op.not_equal(op.unsqueeze(self.attention_mask, _ints(1, 2)), _int(0))
        if window is None:
            seen = op.bitwise_and(causal, present)
        else:
            inside = op.greater(key, op.add(query, _int(-window)))
            seen = op.bitwise_and(causal, inside)
            seen = op.bitwise_and(seen, present)
            seen = op.bitwise_and(causal, seen)
            seen = op.bitwise_and(seen, present)
        seen = op.broadcast(
            seen, op.concat([self.batch, *[op.unsqueeze(size, _int(0)) for size in (_int(1), tokens, total)]], 0)
        )
        mask = op.select(seen, _float(0.0), _float(-3.4028234663852886e38))
        mask = op.slice(mask, _ints(0), op.unsqueeze(total, _int(0)), _ints(1), _ints(3))
        self.masks[window] = mask
        return mask

    def _parameter(self, name: str, element_type: Any, rank: int) -> Any:
        from openvino import PartialShape
        from openvino import opset13 as op

        parameter = op.parameter(PartialShape([self.any_size] * rank), element_type, name=name)
        parameter.output(0).set_names({name})
        return parameter


def _int(value: int) -> Any:
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(value, np.int64))


def _ints(*values: int) -> Any:
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(values, np.int64))


def _float(value: float) -> Any:
    import numpy as np
    from openvino import opset13 as op

    return op.constant(np.array(value, np.float32))


def _same(left: Array, right: Array) -> bool:
    """Equal values, compared in pieces."""
    import numpy as np

    if left.shape != right.shape:
        return False
    step = 4096
    return left is right or all(
        np.array_equal(left[start : start + step], right[start : start + step]) for start in range(0, len(left), step)
    )


def _missing(layer: int, name: str) -> SourceError:
    return SourceError(
        f"the checkpoint has no transformer.layers.{layer}.{name}",
        why="the openvino engine builds its graph from the rank files alone",
        next="convert the model again (lpx build --to checkpoint --force)",
    )
