"""Inputs of a decoder graph, and the sizes that its parts read off them."""

from __future__ import annotations

from typing import Any

from lpxbuild.engine.openvino.nodes import integer, integers, parameter, size_of


class Inputs:
    """input_ids, attention_mask, position_ids (i64 [batch, tokens]; the mask [batch, past + tokens]) and beam_idx.

    Attributes:
        batch: i64 [1].
        tokens, total: i64 scalars: tokens of this step, and with those of the KV cache.
    """

    def __init__(self) -> None:
        from openvino import Type
        from openvino import opset13 as op

        self.input_ids = parameter("input_ids", Type.i64, 2)
        self.attention_mask = parameter("attention_mask", Type.i64, 2)
        self.position_ids = parameter("position_ids", Type.i64, 2)
        self.beam_idx = parameter("beam_idx", Type.i32, 1)
        self.batch = op.gather(op.shape_of(self.input_ids), integers(0), integer(0))
        self.tokens = size_of(self.input_ids, 1)
        self.total = size_of(self.attention_mask, 1)

    def all(self) -> list[Any]:
        return [self.input_ids, self.attention_mask, self.position_ids, self.beam_idx]
