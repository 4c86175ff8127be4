"""Linears of a quantized source as TensorRT-LLM stores them: the same codes, packed, split and stacked anew.

Only what is stacked into one linear and must share a scale is rounded again: FP8 weights of q, k and v (and of an
expert's two halves) go to their largest scale, NVFP4 ones to their largest global scale; a part that has that scale
already keeps its bits. Groups of 4-bit integers, scales of rows and factors of the input are carried over as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.checkpoint.layout import Linear, Piece, RankTensor
from lpxbuild.checkpoint.quantized_layout import FACTORS, INPUT_SCALE, INT4, NVFP4, ROW_SCALE, SCALE, SCALE_2
from lpxbuild.checkpoint.reexpress_scales import (
    fp4_block_scales,
    fp4_codes,
    fp8_codes,
    group_scales,
    largest_fp4_scale,
    largest_fp8_scale,
)
from lpxbuild.errors import SourceError
from lpxbuild.quantization import int4, nvfp4
from lpxbuild.source.quantized import Read, SourceQuantization
from lpxbuild.source.quantized.integers import IntLinear
from lpxbuild.source.quantized.linears import Fp4Linear

Array = npt.NDArray[Any]


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
        return int4.pack_rows(rows) if kind in INT4 else rows

    def scales(self, dtype: Any) -> Mapping[str, Array]:
        """Everything stored beside the weight, by the suffix of its name.

        Args:
            dtype: numpy type of the checkpoint, for factors of the input.

        Raises:
            SourceError: modules that become one linear have factors of their own.
        """
        kind = self.format
        if kind == "fp8":
            return {SCALE: self._stacked(self._fp8_scales), INPUT_SCALE: self._input_scale()}
        if kind == "fp8_pc_pt":
            return {ROW_SCALE: self._by_rows(lambda one, a, b, _: one.row_scales(self.read, a, b))}
        if kind in NVFP4:
            common = self._fp4_scales
            found: dict[str, Array] = {
                SCALE: self._block_scales(),
                SCALE_2: common if len(self.tensor.shape) == 3 else common.reshape(()),
            }
            if kind == "nvfp4":
                found[INPUT_SCALE] = self._input_scale().reshape(())
            return found
        found = {SCALE: self._by_rows(self._group_scales)}
        if kind != "int4_rtn":
            found[FACTORS] = self._factors(dtype)
        if kind == "w4a8_awq":
            second = [max(one.weight_scale_2(self.read) for one in self._modules(expert)) for expert in self._experts()]
            found |= {SCALE_2: self._stacked(np.array(second, np.float32)), INPUT_SCALE: self._input_scale()}
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
            codes = fp8_codes(module, self.read, begin, end, self._fp8_scales[self._expert_of(piece)])
        elif kind in NVFP4:
            codes = fp4_codes(module, self.read, begin, end, self._fp4_scales[self._expert_of(piece)])
            first, last = first // 2, last // 2
        else:
            codes = module.codes(self.read, begin, end)
        return codes[:, first:last]

    @cached_property
    def _fp8_scales(self) -> Array:
        """The largest weight scale of each expert's modules, float32."""
        return np.array([largest_fp8_scale(self._modules(one), self.read) for one in self._experts()], np.float32)

    @cached_property
    def _fp4_scales(self) -> Array:
        """The largest global scale of each expert's modules, float32."""
        return np.array([largest_fp4_scale(self._modules(one), self.read) for one in self._experts()], np.float32)

    # scales -----------------------------------------------------------------------------------------------------

    def _input_scale(self) -> Array:
        """The largest of all modules, since they multiply the same input; of experts too: shape (1,)."""
        return np.array([max(one.input_scale(self.read) for one in self._modules())], np.float32)

    def _block_scales(self) -> Array:
        common = self._fp4_scales

        def rows(module: Fp4Linear, begin: int, end: int, piece: Piece) -> Array:
            first, last = piece.columns
            scales = fp4_block_scales(module, self.read, begin, end, common[self._expert_of(piece)])
            return scales[:, first // nvfp4.BLOCK : last // nvfp4.BLOCK]

        return self._by_rows(rows)

    def _group_scales(self, module: IntLinear, begin: int, end: int, piece: Piece) -> Array:
        first, last = piece.columns
        scales = group_scales(module, self.read, begin, end, self.group_size)
        return scales[:, first // self.group_size : last // self.group_size]

    def _factors(self, dtype: Any) -> Array:
        """(in,), of experts (experts, in), of the columns that this rank has; ones where the factors went into the norm
        before the linear."""
        first, last = self.tensor.pieces[0].columns
        rows = [self._shared_factors(self._modules(expert))[first:last] for expert in self._experts()]
        stacked = np.stack(rows) if len(self.tensor.shape) == 3 else rows[0]
        return stacked.astype(np.float32).astype(dtype)

    def _shared_factors(self, modules: list[IntLinear]) -> Array:
        vectors: dict[bytes, Array] = {}
        for module in modules:
            factors = module.pre_quant_scale(self.read)
            whole = np.ones(module.shape[1], ml_dtypes.bfloat16) if factors is None else np.ascontiguousarray(factors)
            vectors[whole.tobytes()] = whole
        if len(vectors) > 1:
            raise SourceError(
                f"{' and '.join(module.module for module in modules)} have pre_quant_scale of their own",
                why="TensorRT-LLM stacks them into one linear with one factor for each input feature",
                next="build for backend pytorch, which loads these files as they are",
            )
        (vector,) = vectors.values()
        return vector
