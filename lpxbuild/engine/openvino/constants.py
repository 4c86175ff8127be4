"""Arrays as OpenVINO constants.

Constants share the memory of their arrays (a mapped rank file costs nothing), so a `Constants` must live until the
model is saved.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.weights import MergedWeights, in_steps

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

_ELEMENT_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "i8", "uint8": "u8"}


class Constants:
    """Makes the weight nodes of one model; every node is float32 of shape [out, in] or as given."""

    def __init__(self, weights: MergedWeights) -> None:
        self._weights = weights
        self._alive: list[Any] = []

    def exact(self, array: Array) -> Any:
        """The checkpoint's own values; 16-bit ones are widened when the engine is loaded."""
        from openvino import Type
        from openvino import opset13 as op

        node = self._shared(array, _ELEMENT_TYPES[array.dtype.name], array.shape)
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
        for start, end in in_steps(0, array.shape[0]):
            rows = slice(start, end)
            block = np.asarray(array[rows], dtype=np.float32)
            scales[rows] = np.abs(block).max(axis=1, keepdims=True) / np.float32(127)
            divisor = np.where(scales[rows] == 0, np.float32(1), scales[rows])
            quantized[rows] = np.rint(block / divisor)
        return self.scaled(quantized, "i8", quantized.shape, scales)

    def scaled(self, stored: Array, element_type: str, shape: tuple[int, ...], scales: Array) -> Any:
        """stored × scales: the form that the CPU plugin keeps compressed in memory.

        Args:
            stored: integers or bytes of small floats; types of 4 bits lie two in a byte, the even one low.
            element_type: OpenVINO's name ("i8", "i4", "f4e2m1", "f8e4m3").
            shape: of the elements; the last dimension of group formats is the group.
            scales: float32, one for each element of `shape` but the last dimension, or a single one.
        """
        from openvino import Type
        from openvino import opset13 as op

        widened = op.convert(self._shared(stored, element_type, shape), Type.f32)
        return op.multiply(widened, self._shared(scales, "f32", scales.shape))

    def _shared(self, array: Array, element_type: str, shape: tuple[int, ...]) -> Any:
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
