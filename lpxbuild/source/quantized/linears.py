"""Floating-point and int8 weights: how they lie in the files, what they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpxbuild.source.quantized.records import FLOATS, ExpectedTensor, QuantizedLinear, Read

if TYPE_CHECKING:
    from lpxbuild.source.quantized.arrays import Float32

ONE: tuple[tuple[int, ...], ...] = ((), (1,))
"""Shapes of a single number."""


@dataclass(frozen=True)
class Fp8Linear(QuantizedLinear):
    """FP8 E4M3 weight (out, in), value = code · scale, with one scale or one for each row.

    Attributes:
        per_row: scales for each output row; else one for the matrix. None = the files decide.
        static_input: an `input_scale` is stored (largest input / 448).
    """

    per_row: bool | None = False
    static_input: bool = False

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """weight, weight_scale, input_scale."""
        rows = ((self.shape[0],), (self.shape[0], 1))
        shapes = ONE + rows if self.per_row is None else rows if self.per_row else ONE
        found = [
            ExpectedTensor(self.name("weight"), ("F8_E4M3",), (self.shape,)),
            ExpectedTensor(self.name("weight_scale"), FLOATS, shapes),
        ]
        if self.static_input:
            found.append(ExpectedTensor(self.name("input_scale"), FLOATS, ONE))
        return tuple(found)

    def codes(self, read: Read, begin: int, end: int) -> Any:
        """(rows, in) of float8_e4m3fn."""
        return read(self.name("weight"))[begin:end]

    def row_scales(self, read: Read, begin: int, end: int) -> Float32:
        """(rows,) float32, also where one scale serves all rows."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import to_float

        scales = read(self.name("weight_scale")).reshape(-1)
        return to_float(scales[begin:end]) if len(scales) > 1 else np.repeat(to_float(scales), end - begin)

    def input_scale(self, read: Read) -> float:
        """Largest input / 448, as calibrated."""
        return float(read(self.name("input_scale")).reshape(-1)[0])

    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """code · scale in float32."""
        from lpxbuild.source.quantized.arrays import to_float

        return to_float(self.codes(read, begin, end)) * self.row_scales(read, begin, end)[:, None]


@dataclass(frozen=True)
class BlockFp8Linear(QuantizedLinear):
    """FP8 E4M3 weight with one scale for each block of rows and columns (DeepSeek-V3): value = code · scale_inv.

    The scale's name ends in `_inv` because it is the inverse of what the weight was multiplied with.
    """

    block: tuple[int, int] = (128, 128)
    scale: str = "weight_scale_inv"

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """weight and its scales, (out / block, in / block) rounded up."""
        rows, columns = (-(-size // block) for size, block in zip(self.shape, self.block))
        return (
            ExpectedTensor(self.name("weight"), ("F8_E4M3",), (self.shape,)),
            ExpectedTensor(self.name(self.scale), FLOATS, ((rows, columns),)),
            ExpectedTensor(self.name("input_scale"), FLOATS, ONE, required=False),
        )

    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """code · scale of its block in float32."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import to_float

        rows, columns = self.block
        scales = to_float(read(self.name(self.scale))[begin // rows : -(-end // rows)])
        scales = np.repeat(scales, rows, axis=0)[begin % rows : begin % rows + end - begin]
        scales = np.repeat(scales, columns, axis=1)[:, : self.shape[1]]
        return to_float(read(self.name("weight"))[begin:end]) * scales


@dataclass(frozen=True)
class Fp4Linear(QuantizedLinear):
    """NVFP4: 4-bit floats, two columns a byte, an FP8 scale for 16 columns and a float32 one for all.

    ModelOpt stores the global scale itself (largest weight / (6 · 448)); compressed-tensors stores its inverse, and
    has other names.

    Attributes:
        static_input: the global scale of the input is stored.
        packed, global_scale, input_global_scale: suffixes of the tensors.
        inverse: the global scales are stored as their inverses.
    """

    static_input: bool = True
    packed: str = "weight"
    global_scale: str = "weight_scale_2"
    input_global_scale: str = "input_scale"
    inverse: bool = False

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """Packed weight, scales of the blocks, global scales."""
        rows, columns = self.shape
        found = [
            ExpectedTensor(self.name(self.packed), ("U8",), ((rows, columns // 2),)),
            ExpectedTensor(self.name("weight_scale"), ("F8_E4M3",), ((rows, columns // 16),)),
            ExpectedTensor(self.name(self.global_scale), ("F32",), ONE),
        ]
        if self.static_input:
            found.append(ExpectedTensor(self.name(self.input_global_scale), ("F32",), ONE))
        return tuple(found)

    def codes(self, read: Read, begin: int, end: int) -> Any:
        """(rows, in / 2) uint8, the even column in the low nibble."""
        return read(self.name(self.packed))[begin:end]

    def block_scales(self, read: Read, begin: int, end: int) -> Any:
        """(rows, in / 16) of float8_e4m3fn."""
        return read(self.name("weight_scale"))[begin:end]

    def weight_scale_2(self, read: Read) -> Any:
        """Global scale of the weight, float32."""
        return self._global(read, self.global_scale)

    def input_scale(self, read: Read) -> float:
        """Global scale of the input: largest input / (6 · 448)."""
        return float(self._global(read, self.input_global_scale))

    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """code · (block scale · global scale) in float32."""
        from lpxbuild.source.quantized.arrays import spread, to_float, unpack_fp4

        scales = to_float(self.block_scales(read, begin, end)) * self.weight_scale_2(read)
        return unpack_fp4(self.codes(read, begin, end)) * spread(scales, self.shape[1])

    def _global(self, read: Read, suffix: str) -> Any:
        import numpy as np

        stored = read(self.name(suffix)).reshape(-1)[0].astype(np.float32)
        return np.float32(1) / stored if self.inverse else stored


@dataclass(frozen=True)
class Int8Linear(QuantizedLinear):
    """int8 weight (out, in): value = code · scale, with one scale or one for each row; zero points of the weight are 0.

    Attributes:
        smoothed: a `pre_quant_scale` (in,) is stored, and the input is multiplied with it (SmoothQuant).
        static_input: an `input_scale` is stored.
    """

    smoothed: bool = False
    static_input: bool = False

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """weight, scales; zero points only where the method has them."""
        rows = ((self.shape[0],), (self.shape[0], 1))
        found = [
            ExpectedTensor(self.name("weight"), ("I8",), (self.shape,)),
            ExpectedTensor(self.name("weight_scale"), FLOATS, ONE + rows),
            ExpectedTensor(self.name("weight_zero_point"), ("I8",), ONE + rows, required=False),
            ExpectedTensor(self.name("input_zero_point"), ("I8",), ONE, required=False),
            ExpectedTensor(self.name("input_scale"), FLOATS, ONE, required=self.static_input),
        ]
        if self.smoothed:
            found.append(ExpectedTensor(self.name("pre_quant_scale"), FLOATS, ((self.shape[1],),)))
        return tuple(found)

    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """code · scale · pre_quant_scale in float32."""
        from lpxbuild.source.quantized.arrays import to_float

        scales = to_float(read(self.name("weight_scale")).reshape(-1))
        values = to_float(read(self.name("weight"))[begin:end])
        values *= scales[begin:end, None] if len(scales) > 1 else scales[0]
        return values * to_float(read(self.name("pre_quant_scale"))) if self.smoothed else values
