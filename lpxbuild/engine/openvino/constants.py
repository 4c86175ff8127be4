"""Weights as OpenVINO constants: the checkpoint's values, int8 per channel, or TensorRT-LLM's weight-only rule.

Constants share the memory of their arrays (a mapped rank file costs nothing), so a `Constants` must live until the
model is saved.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.weights import MergedWeights

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_ELEMENT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "uint8": "u8"}
_ROWS_AT_ONCE = 1024


class Constants:
    """Makes the weight nodes of one model; every node is float32 of shape [out, in] or as given."""

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self._alive: list[Any] = []

    def exact(self, array: Array) -> Any:
        """The checkpoint's own values; 16-bit ones are widened when the engine is loaded."""
        from openvino import Type
        from openvino import opset13 as op

        node = self._constant(array, _ELEMENT_TYPES[array.dtype.name], array.shape)
        return node if array.dtype.name == "float32" else op.convert(node, Type.f32)

    def vector(self, array: Array, *shape: int) -> Any:
        """A norm weight or bias, float32, reshaped for broadcasting."""
        import numpy as np
        from openvino import opset13 as op

        return op.constant(np.ascontiguousarray(array, dtype=np.float32).reshape(shape))

    def int8_per_channel(self, array: Array) -> Any:
        """Symmetric int8 with one float32 scale per output row (max|w| / 127): OpenVINO's own int8 weights."""
        import numpy as np

        quantized = self._weights.scratch_array(array.shape, np.int8)
        scales = np.empty((array.shape[0], 1), np.float32)
        for start in range(0, array.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            block = np.asarray(array[rows], dtype=np.float32)
            scales[rows] = np.abs(block).max(axis=1, keepdims=True) / np.float32(127)
            divisor = np.where(scales[rows] == 0, np.float32(1), scales[rows])
            quantized[rows] = np.rint(block / divisor)
        return self._scaled(quantized, "i8", quantized.shape, scales)

    def weight_only(self, parts: Sequence[Array], bits: int, *, row_parallel: bool) -> Any:
        """TensorRT-LLM's W8A16 / W4A16: every rank quantizes its own piece, one scale per output row.

        Pieces of a row-parallel tensor lie side by side, so they become groups [out, ranks, in / ranks] with a scale
        each; pieces of any other tensor lie one below the other.
        """
        import numpy as np
        from openvino import opset13 as op

        from lpxbuild.quantization.weight_only import quantize

        grouped = row_parallel and len(parts) > 1
        rows = parts[0].shape[0] if grouped else sum(part.shape[0] for part in parts)
        columns = parts[0].shape[1]
        shape = (rows, len(parts), columns) if grouped else (rows, columns)
        packed_columns = columns if bits == 8 else columns // 2
        stored = self._weights.scratch_array((*shape[:-1], packed_columns), np.int8 if bits == 8 else np.uint8)
        scales = np.empty((*shape[:-1], 1), np.float32)
        below = 0
        for index, part in enumerate(parts):
            for start in range(0, part.shape[0], _ROWS_AT_ONCE):
                block = part[start : start + _ROWS_AT_ONCE]
                quantized, scale = quantize(block, bits)
                target = slice(below + start, below + start + block.shape[0])
                place = (target, index) if grouped else (target,)
                stored[place] = quantized if bits == 8 else _pack_nibbles(quantized)
                scales[place] = np.asarray(scale, dtype=np.float32).reshape(-1, 1)
            below += 0 if grouped else part.shape[0]
        node = self._scaled(stored, "i8" if bits == 8 else "i4", shape, scales)
        if not grouped:
            return node
        return op.reshape(node, op.constant(np.array([rows, len(parts) * columns], np.int64)), False)

    def _scaled(self, stored: Array, element_type: str, shape: tuple[int, ...], scales: Array) -> Any:
        from openvino import Type
        from openvino import opset13 as op

        widened = op.convert(self._constant(stored, element_type, shape), Type.f32)
        return op.multiply(widened, op.constant(scales))

    def _constant(self, array: Array, element_type: str, shape: tuple[int, ...]) -> Any:
        import numpy as np
        import openvino as ov
        from openvino import opset13 as op

        array = np.ascontiguousarray(array)
        # OpenVINO refuses to share a read-only array although it never writes to a constant.
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        view = np.frombuffer(memoryview(memory), dtype=np.uint8)
        numpy_type = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16, "i8": np.int8}.get(
            element_type, np.uint8
        )
        view = view.view(numpy_type)
        tensor = ov.Tensor(view, ov.Shape(list(shape)), getattr(ov.Type, element_type))
        self._alive.append((array, view, tensor))
        return op.constant(tensor)


def _pack_nibbles(values: Array) -> Array:
    """int8 values of -8..7, [rows, columns] -> uint8 [rows, columns / 2], even column in the low nibble."""
    import numpy as np

    nibbles = values.astype(np.uint8) & np.uint8(0x0F)
    packed: Array = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed
