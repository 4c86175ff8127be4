"""Linears of a quantized source as TensorRT-LLM stores them: the same codes, packed, split and stacked anew.

Only what is stacked into one linear and must share a scale is rounded again: FP8 weights of q, k and v (and of an
expert's two halves) go to their largest scale, NVFP4 ones to their largest global scale; a part that has that scale
already keeps its bits. Groups of 4-bit integers, scales of rows and factors of the input are carried over as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.checkpoint.layout import Linear, Piece, RankTensor
from lpxbuild.errors import SourceError
from lpxbuild.quantization import fp8, int4, nvfp4
from lpxbuild.source.quantized import Read, SourceQuantization
from lpxbuild.source.quantized.integers import IntLinear
from lpxbuild.source.quantized.linears import Fp4Linear, Fp8Linear

Array = npt.NDArray[Any]

WEIGHT_SCALE = "weights_scaling_factor"
WEIGHT_SCALE_2 = "weights_scaling_factor_2"
INPUT_SCALE = "activation_scaling_factor"
ROW_SCALE = "per_channel_scale"
INPUT_FACTOR = "prequant_scaling_factor"


@dataclass(frozen=True)
class Reexpressed:
    """One linear of one rank, made of the quantized modules of its plan.

    Attributes:
        tensor: the weight in the plan; its shape is that of the plain matrix, (out, in) or (experts, out, in).
        quantization: the source's.
        read: gives the files' tensors (`lpxbuild.source.quantized.arrays.mapped`).
        group_size: input features of a group in what is written.
    """

    tensor: RankTensor
    quantization: SourceQuantization
    read: Read
    group_size: int

    @property
    def linear(self) -> Linear:
        """The whole linear."""
        assert self.tensor.linear is not None
        return self.tensor.linear

    @property
    def format(self) -> str:
        """lpx's name of the format."""
        return str(self._module(self.tensor.pieces[0]).format)

    def weight_rows(self, begin: int, end: int) -> Array:
        """The stored weight for plain rows begin … end, counted through all experts.

        FP8: (rows, in) float8_e4m3fn. Integers: (rows / 2, in) int8, so begin and end are even. NVFP4: (rows, in / 2)
        uint8.
        """
        kind = self.format
        blocks = [self._codes(piece, first, last, kind) for piece, first, last in self._pieces(begin, end)]
        rows = np.concatenate(blocks) if len(blocks) > 1 else np.ascontiguousarray(blocks[0])
        return int4.pack_rows(rows) if kind.startswith(("int4", "w4a8")) else rows

    def scales(self, dtype: Any) -> Mapping[str, Array]:
        """Everything stored beside the weight, by the suffix of its name.

        Args:
            dtype: numpy type of the checkpoint, for factors of the input.

        Raises:
            SourceError: modules that become one linear have factors of their own.
        """
        kind = self.format
        if kind == "fp8":
            return {WEIGHT_SCALE: self._stacked(self._fp8_scales()), INPUT_SCALE: self._input_scale()}
        if kind == "fp8_pc_pt":
            return {ROW_SCALE: self._by_rows(lambda one, a, b, _: one.row_scales(self.read, a, b))}
        if "nvfp4" in kind:
            found: dict[str, Array] = {WEIGHT_SCALE: self._block_scales(), WEIGHT_SCALE_2: self._fp4_scales()}
            if kind == "nvfp4":
                found[INPUT_SCALE] = self._input_scale().reshape(())
            return found
        found = {WEIGHT_SCALE: self._by_rows(self._group_scales)}
        if kind != "int4_rtn":
            found[INPUT_FACTOR] = self._factors(dtype)
        if kind == "w4a8_awq":
            modules = self._modules()
            found[WEIGHT_SCALE_2] = np.array([max(one.weight_scale_2(self.read) for one in modules)], np.float32)
            found[INPUT_SCALE] = np.array([max(one.input_scale(self.read) for one in modules)], np.float32)
        return found

    # pieces -----------------------------------------------------------------------------------------------------

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[Piece, int, int]]:
        """Pieces that hold rank rows begin … end, with the rows of their HF module."""
        for piece in sorted(self.tensor.pieces, key=lambda one: one.at):
            count = piece.rows[1] - piece.rows[0]
            first, last = max(begin, piece.at), min(end, piece.at + count)
            if first < last:
                yield piece, piece.rows[0] + first - piece.at, piece.rows[0] + last - piece.at

    def _module(self, piece: Piece) -> Any:
        return self.quantization.linears[piece.source.removesuffix(".weight")]

    def _modules(self, expert: int | None = None) -> list[Any]:
        """The modules of the whole linear, or those of one expert; their class follows from the format."""
        names = dict.fromkeys(part.module for part in self.linear.parts if expert is None or part.expert == expert)
        return [self.quantization.linears[name] for name in names]

    def _experts(self) -> list[int | None]:
        return list(dict.fromkeys(part.expert for part in self.linear.parts))

    def _expert_of(self, piece: Piece) -> int:
        return self._experts().index(self.linear.parts[piece.part].expert)

    def _by_rows(self, rows: Callable[[Any, int, int, Piece], Array]) -> Array:
        """What each output row has, stacked like the weight."""
        blocks = [
            rows(self._module(piece), first, last, piece)
            for piece, first, last in self._pieces(0, self.tensor.size // self.tensor.shape[-1])
        ]
        stacked: Array = np.concatenate(blocks)
        return stacked.reshape(*self.tensor.shape[:-1], *stacked.shape[1:])

    def _stacked(self, scales: Array) -> Array:
        """One number in shape (1,), of experts (experts, 1)."""
        return scales.reshape(-1, 1) if len(self.tensor.shape) == 3 else scales.reshape(1)

    # weights ----------------------------------------------------------------------------------------------------

    def _codes(self, piece: Piece, begin: int, end: int, kind: str) -> Array:
        module, (first, last) = self._module(piece), piece.columns
        if kind == "fp8":
            codes = self._fp8(module, piece, begin, end)
        elif "nvfp4" in kind:
            codes, first, last = self._fp4(module, piece, begin, end), first // 2, last // 2
        else:
            codes = module.codes(self.read, begin, end)
        return codes[:, first:last]

    def _fp8_scales(self) -> Array:
        """The largest weight scale of each expert's modules, float32."""
        return np.array(
            [max(one.row_scales(self.read, 0, 1)[0] for one in self._modules(expert)) for expert in self._experts()],
            np.float32,
        )

    def _fp8(self, module: Fp8Linear, piece: Piece, begin: int, end: int) -> Array:
        codes: Array = module.codes(self.read, begin, end)
        own, common = module.row_scales(self.read, 0, 1)[0], self._fp8_scales()[self._expert_of(piece)]
        return codes if own == common else fp8.encode(fp8.decode(codes, own), common)

    def _fp4_scales(self) -> Array:
        """The largest global scale of each expert's modules, float32; without dimension where there are no experts."""
        scales = np.array(
            [max(one.weight_scale_2(self.read) for one in self._modules(expert)) for expert in self._experts()],
            np.float32,
        )
        return scales if len(self.tensor.shape) == 3 else scales.reshape(())

    def _fp4_blocks(self, module: Fp4Linear, piece: Piece, begin: int, end: int) -> Array:
        """FP8 scales of the blocks of whole rows, against the common global scale."""
        scales: Array = module.block_scales(self.read, begin, end)
        own, common = module.weight_scale_2(self.read), self._fp4_scales().reshape(-1)[self._expert_of(piece)]
        if own == common:
            return scales
        moved = scales.astype(np.float32) * (own / common)
        clipped: Array = np.clip(moved, np.float32(nvfp4.SMALLEST_SCALE), np.float32(nvfp4.SCALE_MAX))
        return clipped.astype(scales.dtype)

    def _fp4(self, module: Fp4Linear, piece: Piece, begin: int, end: int) -> Array:
        codes: Array = module.codes(self.read, begin, end)
        own, common = module.weight_scale_2(self.read), self._fp4_scales().reshape(-1)[self._expert_of(piece)]
        if own == common:
            return codes
        values = nvfp4.decode(codes, module.block_scales(self.read, begin, end), own)
        return nvfp4.encode(values, self._fp4_blocks(module, piece, begin, end), common)

    # scales -----------------------------------------------------------------------------------------------------

    def _input_scale(self) -> Array:
        """The largest of all modules, since they multiply the same input; of experts too: shape (1,)."""
        return np.array([max(one.input_scale(self.read) for one in self._modules())], np.float32)

    def _block_scales(self) -> Array:
        def rows(module: Fp4Linear, begin: int, end: int, piece: Piece) -> Array:
            first, last = piece.columns
            return self._fp4_blocks(module, piece, begin, end)[:, first // nvfp4.BLOCK : last // nvfp4.BLOCK]

        return self._by_rows(rows)

    def _group_scales(self, module: IntLinear, begin: int, end: int, piece: Piece) -> Array:
        """(rows, groups of `group_size`) float32: a scale of a larger group is repeated."""
        scales = module.group_scales(self.read, begin, end)
        repeated = np.repeat(scales, (module.group_size or module.shape[1]) // self.group_size, axis=1)
        first, last = piece.columns
        return repeated[:, first // self.group_size : last // self.group_size]

    def _factors(self, dtype: Any) -> Array:
        """(in,) of what this rank has; ones where the factors went into the norm before the linear."""
        columns = self.tensor.pieces[0].columns
        vectors: dict[bytes, Array] = {}
        names = []
        for module in self._modules():
            factors = module.pre_quant_scale(self.read)
            whole = np.ones(module.shape[1], ml_dtypes.bfloat16) if factors is None else np.ascontiguousarray(factors)
            if whole.tobytes() not in vectors:
                names.append(module.module)
            vectors[whole.tobytes()] = whole
        if len(vectors) > 1:
            raise SourceError(
                f"{' and '.join(names[:2])} have pre_quant_scale of their own",
                why="TensorRT-LLM stacks them into one linear with one factor for each input feature",
                next="build for backend pytorch, which loads these files as they are",
            )
        (vector,) = vectors.values()
        return vector[columns[0] : columns[1]].astype(np.float32).astype(dtype)


def check_contents(quantization: SourceQuantization, read: Read) -> None:
    """Refuse what only small tensors of the files tell: zero points of a symmetric model, an order of the groups.

    Raises:
        SourceError: names the tensor.
    """
    for linear in quantization.linears.values():
        wrong = linear.check_contents(read) if isinstance(linear, IntLinear) else None
        if wrong is not None:
            raise SourceError(
                f"the source is already quantized ({quantization.title}), and {wrong}",
                why="the settings in config.json say otherwise",
                next="give the original, unquantized model as model.source",
            )
