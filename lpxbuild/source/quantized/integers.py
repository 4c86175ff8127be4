"""4-bit integer weights with scales for groups of input features: ModelOpt, compressed-tensors, GPTQ, AutoAWQ.

All give the same two things: codes (rows, in) as int8 in -8 … 7, and scales (rows, groups) in float32.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpxbuild.source.quantized.linears import ONE
from lpxbuild.source.quantized.records import FLOATS, ExpectedTensor, QuantizedLinear, Read

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lpxbuild.source.quantized.arrays import Float32

    Codes = npt.NDArray[np.int8]


@dataclass(frozen=True)
class IntLinear(QuantizedLinear):
    """Integers of `bits` bits with a scale for each group of input features.

    Attributes:
        group_size: input features of a group; 0 = all of them.
        symmetric: codes stand for themselves; else a zero point is taken off first.
    """

    group_size: int = 128
    symmetric: bool = True
    bits: int = 4

    @property
    def groups(self) -> int:
        """Number of groups of a row."""
        return -(-self.shape[1] // self.group_size) if self.group_size else 1

    @abstractmethod
    def codes(self, read: Read, begin: int, end: int) -> Codes:
        """(rows, in), the middle of the range already taken off (-8 … 7 for 4 bits)."""

    @abstractmethod
    def group_scales(self, read: Read, begin: int, end: int) -> Float32:
        """(rows, groups)."""

    def zero_points(self, read: Read, begin: int, end: int) -> Float32 | None:
        """(rows, groups) that are taken off the codes; None = zero everywhere."""
        return None

    def pre_quant_scale(self, read: Read) -> Any | None:
        """(in,) factors of the input, in the stored type; None = there are none."""
        return None

    def check_contents(self, read: Read) -> str | None:
        """What only the tensors themselves say, and what is wrong with it; small tensors are read for that."""
        return None

    def dense(self, read: Read, begin: int, end: int) -> Float32:
        """(code - zero) · scale · pre_quant_scale in float32."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import spread, to_float

        columns = self.shape[1]
        values = self.codes(read, begin, end).astype(np.float32)
        zeros = self.zero_points(read, begin, end)
        if zeros is not None:
            values -= spread(zeros, columns)
        values *= spread(self.group_scales(read, begin, end), columns)
        factors = self.pre_quant_scale(read)
        return values if factors is None else values * to_float(factors)


@dataclass(frozen=True)
class RowPairLinear(IntLinear):
    """ModelOpt's int4: a byte holds an even output row (low nibble) and the odd one below it.

    Attributes:
        smoothed: a `pre_quant_scale` (in,) is stored; of most linears it went into the norm before them.
        second_scale: `weight_scale_2` and `input_scale` are stored (W4A8).
    """

    smoothed: bool = False
    second_scale: bool = False

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """weight (out / 2, in), weight_scale (out, groups), pre_quant_scale, weight_scale_2, input_scale."""
        rows, columns = self.shape
        found = [
            ExpectedTensor(self.name("weight"), ("U8", "I8"), ((rows // 2, columns),)),
            ExpectedTensor(self.name("weight_scale"), FLOATS, ((rows, self.groups),)),
        ]
        if self.smoothed:
            found.append(ExpectedTensor(self.name("pre_quant_scale"), FLOATS, ((columns,),)))
        if self.second_scale:
            found += [ExpectedTensor(self.name(name), FLOATS, ONE) for name in ("weight_scale_2", "input_scale")]
        return tuple(found)

    def codes(self, read: Read, begin: int, end: int) -> Codes:
        """Signed nibbles."""
        from lpxbuild.source.quantized.arrays import unpack_row_pairs

        return unpack_row_pairs(read(self.name("weight")), begin, end)

    def group_scales(self, read: Read, begin: int, end: int) -> Float32:
        """As stored."""
        from lpxbuild.source.quantized.arrays import to_float

        return to_float(read(self.name("weight_scale"))[begin:end])

    def pre_quant_scale(self, read: Read) -> Any | None:
        """As stored."""
        return read(self.name("pre_quant_scale")) if self.smoothed else None

    def weight_scale_2(self, read: Read) -> Any:
        """Largest weight / 448, float32 (W4A8)."""
        import numpy as np

        return read(self.name("weight_scale_2")).reshape(-1)[0].astype(np.float32)

    def input_scale(self, read: Read) -> float:
        """Largest input / 448 (W4A8)."""
        return float(read(self.name("input_scale")).reshape(-1)[0])


@dataclass(frozen=True)
class PackedLinear(IntLinear):
    """compressed-tensors' pack-quantized: int32 words along the input, the first column in the lowest bits, offset by
    half the range (compressed_tensors/compressors/…/pack_quantized.py)."""

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """weight_packed (out, in · bits / 32), weight_scale (out, groups), weight_shape; zero points where needed."""
        rows, columns = self.shape
        per_word = 32 // self.bits
        found = [
            ExpectedTensor(self.name("weight_packed"), ("I32",), ((rows, -(-columns // per_word)),)),
            ExpectedTensor(
                self.name("weight_scale"), FLOATS, ((rows, self.groups), *(ONE if self.groups == 1 else ()))
            ),
            ExpectedTensor(self.name("weight_shape"), ("I64", "I32"), ((2,),), required=False),
        ]
        if not self.symmetric:
            shape = (-(-rows // per_word), self.groups)
            found.append(ExpectedTensor(self.name("weight_zero_point"), ("I32",), (shape,)))
        return tuple(found)

    def codes(self, read: Read, begin: int, end: int) -> Codes:
        """Unsigned in the file."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import unpack_words

        words = unpack_words(read(self.name("weight_packed"))[begin:end], self.bits)[:, : self.shape[1]]
        return (words - np.uint8(1 << (self.bits - 1))).view(np.int8)

    def group_scales(self, read: Read, begin: int, end: int) -> Float32:
        """As stored; one for the whole matrix is repeated."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import to_float

        scales = read(self.name("weight_scale"))
        if scales.size == 1:
            return np.repeat(to_float(scales).reshape(1, 1), end - begin, axis=0)
        return to_float(scales.reshape(self.shape[0], self.groups)[begin:end])

    def zero_points(self, read: Read, begin: int, end: int) -> Float32 | None:
        """Packed like the weight, but along the output."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import unpack_words

        if self.symmetric:
            return None
        zeros = unpack_words(read(self.name("weight_zero_point")).T, self.bits).T[begin:end]
        return zeros.astype(np.float32) - np.float32(1 << (self.bits - 1))


@dataclass(frozen=True)
class GptqLinear(IntLinear):
    """GPTQ: qweight int32 (in · bits / 32, out), scales (groups, out), qzeros int32 (groups, out · bits / 32).

    Format 1 stores each zero point less one, format 2 as it is (GPTQModel: `checkpoint_format` gptq and gptq_v2).
    A symmetric model has the middle of the range as zero point everywhere.

    Attributes:
        version: 1 or 2.
        bias: a bias is stored although the model has none (AutoGPTQ wrote zeros there).
        g_idx: the group of each input feature is stored; without activation order it counts up.
    """

    version: int = 1
    bias: bool = False
    g_idx: bool = True

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """qweight, qzeros, scales, g_idx, and a bias that says nothing."""
        rows, columns = self.shape
        per_word = 32 // self.bits
        found = [
            ExpectedTensor(self.name("qweight"), ("I32",), ((columns // per_word, rows),)),
            ExpectedTensor(self.name("qzeros"), ("I32",), ((self.groups, -(-rows // per_word)),)),
            ExpectedTensor(self.name("scales"), FLOATS, ((self.groups, rows),)),
        ]
        if self.g_idx:
            found.append(ExpectedTensor(self.name("g_idx"), ("I32",), ((columns,),)))
        if self.bias:
            found.append(ExpectedTensor(self.name("bias"), FLOATS, ((rows,),)))
        return tuple(found)

    def codes(self, read: Read, begin: int, end: int) -> Codes:
        """Unsigned in the file, one column of words for an output row."""
        import numpy as np

        from lpxbuild.source.quantized.arrays import unpack_words

        words = unpack_words(np.ascontiguousarray(read(self.name("qweight"))[:, begin:end].T), self.bits)
        return (words - np.uint8(1 << (self.bits - 1))).view(np.int8)

    def group_scales(self, read: Read, begin: int, end: int) -> Float32:
        """Stored the other way round."""
        from lpxbuild.source.quantized.arrays import to_float

        return to_float(read(self.name("scales"))[:, begin:end].T)

    def stored_zeros(self, read: Read) -> npt.NDArray[np.uint8]:
        """(groups, out) as the file has them."""
        from lpxbuild.source.quantized.arrays import unpack_words

        return unpack_words(read(self.name("qzeros")), self.bits)[:, : self.shape[0]]

    def zero_points(self, read: Read, begin: int, end: int) -> Float32 | None:
        """Relative to the middle of the range; all zero in a symmetric model."""
        import numpy as np

        zeros = self.stored_zeros(read)[:, begin:end].T.astype(np.float32)
        return zeros + np.float32((2 - self.version) - (1 << (self.bits - 1)))

    def check_contents(self, read: Read) -> str | None:
        """Zero points of a symmetric model, the order of the groups, the bias."""
        import numpy as np

        if self.symmetric:
            middle = (1 << (self.bits - 1)) - (2 - self.version)
            zeros = self.stored_zeros(read)
            if (zeros != middle).any():
                other = int(zeros[zeros != middle][0])
                return (
                    f"{self.name('qzeros')} holds {other} where a symmetric model of this format has {middle}: "
                    "it has zero points"
                )
        if self.g_idx:
            order = np.arange(self.shape[1]) // (self.group_size or self.shape[1])
            if (read(self.name("g_idx")) != order).any():
                return f"{self.name('g_idx')} does not count up: the model was quantized in activation order (desc_act)"
        if self.bias and np.any(read(self.name("bias")).astype(np.float32)):
            return f"{self.name('bias')} is not zero, but config.json describes a model without this bias"
        return None


@dataclass(frozen=True)
class AwqLinear(IntLinear):
    """AutoAWQ (gemm): qweight int32 (in, out / 8) along the output with the columns of a word in their own order,
    qzeros (groups, out / 8) alike, scales (groups, out). Value = (code - zero) · scale."""

    symmetric: bool = False

    @property
    def tensors(self) -> tuple[ExpectedTensor, ...]:
        """qweight, qzeros, scales."""
        rows, columns = self.shape
        return (
            ExpectedTensor(self.name("qweight"), ("I32",), ((columns, rows // 8),)),
            ExpectedTensor(self.name("qzeros"), ("I32",), ((self.groups, rows // 8),)),
            ExpectedTensor(self.name("scales"), FLOATS, ((self.groups, rows),)),
        )

    def codes(self, read: Read, begin: int, end: int) -> Codes:
        """Unsigned in the file."""
        import numpy as np

        return (self._ordered(read, "qweight", begin, end) - np.uint8(8)).view(np.int8).T

    def group_scales(self, read: Read, begin: int, end: int) -> Float32:
        """Stored the other way round."""
        from lpxbuild.source.quantized.arrays import to_float

        return to_float(read(self.name("scales"))[:, begin:end].T)

    def zero_points(self, read: Read, begin: int, end: int) -> Float32 | None:
        """Relative to the middle of the range."""
        import numpy as np

        return self._ordered(read, "qzeros", begin, end).T.astype(np.float32) - np.float32(8)

    def _ordered(self, read: Read, suffix: str, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """(n, rows) of unsigned nibbles in the order of the output rows."""
        from lpxbuild.source.quantized.arrays import AWQ_ORDER, unpack_words

        first = begin // 8
        nibbles = unpack_words(read(self.name(suffix))[:, first : -(-end // 8)], 4)
        ordered = nibbles.reshape(len(nibbles), -1, 8)[:, :, AWQ_ORDER].reshape(len(nibbles), -1)
        return ordered[:, begin - 8 * first : end - 8 * first]
