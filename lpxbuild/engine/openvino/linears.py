"""Linear layers: the checkpoint's weights in the form that the graph keeps them in, one function per format.

Only weights are quantized in the graph; activations stay float32 and activation scales are not applied. What a format
stores is kept as it is where OpenVINO multiplies with it exactly: integers, e4m3 and e2m1 floats with float32 scales
per tensor, row or group. Everything else comes dequantized from the checkpoint's reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lpxbuild.engine.openvino.constants import Constants
from lpxbuild.engine.openvino.weights import Block, Matrix, MergedWeights, in_steps, missing

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


class Linears:
    """Makes the products of one model.

    Attributes:
        forms: how the linear layers' weights are kept, by format, for the report.
    """

    def __init__(self, weights: MergedWeights, constants: Constants, *, int8: bool) -> None:
        """`int8`: unquantized weights become OpenVINO's own int8 per channel (precision "fast")."""
        self._weights = weights
        self._constants = constants
        self._int8 = int8
        self.forms: dict[str, str] = {}

    def apply(self, hidden: Any, matrix: Matrix, bias: Array | None = None) -> Any:
        """hidden · weightᵀ + bias."""
        from openvino import opset13 as op

        name = self._weights.ranks.format_of(matrix.weight)
        if name == "none" and self._int8:
            form, node = "int8 per channel", self._constants.int8_per_channel(self._joined(matrix))
        else:
            form, make = _FORMS.get(name, _DEQUANTIZED)
            node = make(self, matrix)
            prequant = self._prequant(matrix) if name in _PREQUANT else None
            if prequant is not None:
                shape = (1,) * (hidden.get_output_partial_shape(0).rank.get_length() - 1) + (-1,)
                hidden = op.multiply(hidden, self._constants.vector(prequant, *shape))
        self.forms[name] = form
        product = op.matmul(hidden, node, False, True)
        if bias is None:
            return product
        shape = (1,) * (hidden.get_output_partial_shape(0).rank.get_length() - 1) + (-1,)
        return op.add(product, self._constants.vector(bias, *shape))

    def table(self, array: Array) -> Any:
        """Embedding and head, which every format leaves alone."""
        return self._constants.int8_per_channel(array) if self._int8 else self._constants.exact(array)

    # One function per format

    def exact(self, matrix: Matrix) -> Any:
        return self._constants.exact(self._joined(matrix))

    def weight_only(self, matrix: Matrix, bits: int) -> Any:
        """TensorRT-LLM's W8A16 / W4A16 on plain weights: every rank quantizes its own piece, one scale per output row.

        Pieces of a row-parallel tensor lie side by side, so they become groups [out, ranks, in / ranks] with a scale
        each; pieces of any other tensor lie one below the other.
        """
        import numpy as np

        from lpxbuild.quantization.weight_only import quantize

        rows, groups = matrix.shape[0], matrix.shape[1] // matrix.columns
        shape = (rows, groups, matrix.columns)
        stored = self._weights.scratch_array(
            (rows, groups, matrix.columns if bits == 8 else matrix.columns // 2), np.int8 if bits == 8 else np.uint8
        )
        scales = np.empty((rows, groups, 1), np.float32)
        for block in matrix.blocks:
            values, group = self._weights.block(matrix, block), block.column // matrix.columns
            for start, end in in_steps(0, len(values)):
                quantized, scale = quantize(values[start:end], bits)
                target = slice(block.row + start, block.row + end)
                stored[target, group] = quantized if bits == 8 else pack_nibbles(quantized)
                scales[target, group, 0] = scale
        return self._grouped(matrix, stored, "i8" if bits == 8 else "i4", shape, scales)

    def int4_groups(self, matrix: Matrix) -> Any:
        """W4A16_AWQ and W4A8_AWQ: nibbles packed along the rows, a scale for each group of input features."""
        import numpy as np

        rows, columns = matrix.shape
        scales = self._group_scales(matrix)
        stored = self._weights.scratch_array((rows, columns // 2), np.uint8)
        for block in matrix.blocks:
            packed = self._weights.ranks.tensor(matrix.weight, block.rank).reshape(-1, matrix.columns)
            packed = packed[block.begin // 2 : block.end // 2]
            place = slice(block.column // 2, (block.column + matrix.columns) // 2)
            for start, end in in_steps(0, len(packed)):
                target = stored[block.row + 2 * start : block.row + 2 * end, place]
                bytes_ = packed[start:end].view(np.uint8)
                low, high = bytes_ & np.uint8(0x0F), bytes_ >> np.uint8(4)
                target[0::2] = low[:, 0::2] | (low[:, 1::2] << np.uint8(4))
                target[1::2] = high[:, 0::2] | (high[:, 1::2] << np.uint8(4))
        groups = scales.shape[1]
        return self._grouped(matrix, stored, "i4", (rows, groups, columns // groups), scales)

    def fp4_groups(self, matrix: Matrix) -> Any:
        """NVFP4: e2m1 with an e4m3 scale for 16 input features, and one float32 scale over all."""
        stored = self._joined(matrix, packed=2)
        scales = self._group_scales(matrix, overall="weights_scaling_factor_2")
        rows, groups = scales.shape[:2]
        return self._grouped(matrix, stored, "f4e2m1", (rows, groups, matrix.shape[1] // groups), scales)

    def int8_rows(self, matrix: Matrix) -> Any:
        """SmoothQuant: int8 with a scale per row."""
        scales = self._row_scales(matrix, "weights_scaling_factor")
        return self._constants.scaled(self._joined(matrix), "i8", matrix.shape, scales)

    def fp8_tensor(self, matrix: Matrix) -> Any:
        """e4m3 with one scale, or one for each expert."""
        import numpy as np

        scale = self._single(matrix, matrix.blocks[0], "weights_scaling_factor")
        return self._constants.scaled(self._joined(matrix), "f8e4m3", matrix.shape, np.full((1, 1), scale, np.float32))

    def fp8_rows(self, matrix: Matrix) -> Any:
        """e4m3 with a scale per row."""
        scales = self._row_scales(matrix, "per_channel_scale")
        return self._constants.scaled(self._joined(matrix), "f8e4m3", matrix.shape, scales)

    def dequantized(self, matrix: Matrix) -> Any:
        """The effective float32 weights, computed by the checkpoint's reader."""
        import numpy as np

        whole = self._weights.scratch_array(matrix.shape, np.float32)
        for block in matrix.blocks:
            columns = slice(block.column, block.column + matrix.columns)
            for start, end in in_steps(block.begin, block.end):
                target = slice(block.row + start - block.begin, block.row + end - block.begin)
                whole[target, columns] = self._weights.ranks.weight_rows(matrix.weight, block.rank, start, end)
        return self._constants.exact(whole)

    # Pieces

    def _joined(self, matrix: Matrix, *, packed: int = 1) -> Array:
        """The stored weight of all ranks, (out, in / packed)."""
        first = self._weights.block(matrix, matrix.blocks[0])
        if len(matrix.blocks) == 1:
            return first
        whole = self._weights.scratch_array((matrix.shape[0], matrix.shape[1] // packed), first.dtype)
        for block in matrix.blocks:
            values = self._weights.block(matrix, block)
            column = block.column // packed
            for start, end in in_steps(0, len(values)):
                whole[block.row + start : block.row + end, column : column + values.shape[1]] = values[start:end]
        return whole

    def _row_scales(self, matrix: Matrix, suffix: str) -> Array:
        """(out, 1). Ranks that hold columns of the same rows share one scale."""
        import numpy as np

        scales = np.empty((matrix.shape[0], 1), np.float32)
        for block in matrix.blocks[:1] if matrix.side_by_side else matrix.blocks:
            values = self._required(matrix, block, suffix)[block.begin : block.end]
            scales[block.row : block.row + len(values), 0] = values
        return scales

    def _group_scales(self, matrix: Matrix, *, overall: str | None = None) -> Array:
        """(out, groups, 1), multiplied by the scale over all where the format has one."""
        import numpy as np

        first = self._weights.block(matrix, matrix.blocks[0], "weights_scaling_factor")
        group = matrix.columns // first.shape[1]
        scales = self._weights.scratch_array((matrix.shape[0], matrix.shape[1] // group, 1), np.float32)
        for block in matrix.blocks:
            values = self._weights.block(matrix, block, "weights_scaling_factor")
            factor = np.float32(1) if overall is None else self._single(matrix, block, overall)
            columns = slice(block.column // group, (block.column + matrix.columns) // group)
            for start, end in in_steps(0, len(values)):
                rows = slice(block.row + start, block.row + end)
                scales[rows, columns, 0] = values[start:end].astype(np.float32) * factor
        return scales

    def _single(self, matrix: Matrix, block: Block, suffix: str) -> Any:
        """A float32 scale over all, of this expert where each has its own."""
        values = self._required(matrix, block, suffix)
        return values[block.expert if len(values) > 1 else 0]

    def _prequant(self, matrix: Matrix) -> Array | None:
        """Factors of the activations, (in,), which the weights were divided by."""
        import numpy as np

        parts = []
        for block in matrix.blocks if matrix.side_by_side else matrix.blocks[:1]:
            values = self._weights.vector(matrix, block, "prequant_scaling_factor")
            if values is None:
                return None
            start = block.expert * matrix.columns if len(values) > matrix.columns else 0
            parts.append(values[start : start + matrix.columns].astype(np.float32))
        return np.concatenate(parts)

    def _required(self, matrix: Matrix, block: Block, suffix: str) -> Array:
        values = self._weights.vector(matrix, block, suffix)
        if values is None:
            raise missing(f"{matrix.module}.{suffix}")
        return values

    def _grouped(self, matrix: Matrix, stored: Array, element_type: str, shape: tuple[int, ...], scales: Array) -> Any:
        from openvino import opset13 as op

        from lpxbuild.engine.openvino.nodes import integers

        if shape[1] == 1:
            return self._constants.scaled(stored, element_type, matrix.shape, scales.reshape(-1, 1))
        return op.reshape(self._constants.scaled(stored, element_type, shape, scales), integers(*matrix.shape), False)


def pack_nibbles(values: Array) -> Array:
    """int8 values of -8..7, [rows, columns] -> uint8 [rows, columns / 2], even column in the low nibble."""
    import numpy as np

    nibbles = values.astype(np.uint8) & np.uint8(0x0F)
    packed: Array = nibbles[:, 0::2] | (nibbles[:, 1::2] << np.uint8(4))
    return packed


_Form = tuple[str, Callable[[Linears, Matrix], Any]]
_INT4_GROUPS: _Form = ("int4, a scale per group", Linears.int4_groups)
_FP4: _Form = ("float4 e2m1, a scale per 16", Linears.fp4_groups)
_FORMS: dict[str, _Form] = {
    "none": ("as in the checkpoint", Linears.exact),
    "int8_wo": ("int8, a scale per row and rank", lambda linears, matrix: linears.weight_only(matrix, 8)),
    "int4_wo": ("int4, a scale per row and rank", lambda linears, matrix: linears.weight_only(matrix, 4)),
    "int4_rtn": _INT4_GROUPS,
    "int4_awq": _INT4_GROUPS,
    "w4a8_awq": _INT4_GROUPS,
    "int8_sq": ("int8, a scale per row", Linears.int8_rows),
    "fp8": ("float8 e4m3, a scale per tensor", Linears.fp8_tensor),
    "fp8_pc_pt": ("float8 e4m3, a scale per row", Linears.fp8_rows),
    "nvfp4": _FP4,
    "w4a16_nvfp4": _FP4,
}
_DEQUANTIZED: _Form = ("float32, dequantized", Linears.dequantized)
_PREQUANT = frozenset({"int4_rtn", "int4_awq", "w4a8_awq", "int8_sq"})
