"""What TensorRT-LLM's checkpoint holds for a linear in each format: names, types, shapes. Writer and reader share it.

`out` and `in` are the features that one rank has; E experts are stacked in front. Scales are F32:

    fp8          weight F8 (out, in), weights_scaling_factor (1) or (E, 1), activation_scaling_factor (1)
    fp8_pc_pt    weight F8 (out, in), per_channel_scale (out)
    int8_sq      weight I8 (out, in), weights_scaling_factor (out), activation_scaling_factor (1),
                 prequant_scaling_factor (in) in the checkpoint's type
    int4_rtn     weight I8 (out / 2, in), weights_scaling_factor (out, in / group)
    int4_awq     as int4_rtn, and prequant_scaling_factor (in) or (E, in) in the checkpoint's type
    w4a8_awq     as int4_awq, and weights_scaling_factor_2 (1) or (E, 1), activation_scaling_factor (1)
    nvfp4        weight U8 (out, in / 2), weights_scaling_factor F8 (out, in / 16), weights_scaling_factor_2 () or (E),
                 activation_scaling_factor (), with experts (1)
    w4a16_nvfp4  as nvfp4 without activation_scaling_factor

int8_wo and int4_wo hold plain weights: TensorRT-LLM's builder quantizes those for its GPU. A quantized KV cache adds
kv_cache_scaling_factor (1) to each attention, and the same for keys and values alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lpxbuild.checkpoint.layout import Linear, RankTensor
from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.quantization.nvfp4 import BLOCK
from lpxbuild.quantization.scheme import Scheme

PLAIN = ("none", "int8_wo", "int4_wo")
"""Formats whose checkpoint holds plain weights."""
INT4 = ("int4_rtn", "int4_awq", "w4a8_awq")
NVFP4 = ("nvfp4", "w4a16_nvfp4")
SMOOTHED = ("int8_sq", "int4_awq", "w4a8_awq")
"""Formats with factors of the input."""

WEIGHT = "weight"
SCALE = "weights_scaling_factor"
SCALE_2 = "weights_scaling_factor_2"
INPUT_SCALE = "activation_scaling_factor"
ROW_SCALE = "per_channel_scale"
FACTORS = "prequant_scaling_factor"
CACHE_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")
"""The larger of the two, keys, values. TensorRT-LLM since 1.0 takes the larger itself, older ones read the first."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of one rank file as it lies there.

    Attributes:
        planned: where its numbers come from: itself, the plain weight of its linear, or the linear of its attention.
        format: lpx's name of the linear's format; "none" for what is no linear.
        suffix: last word of the name of a linear's tensor.
        dtype: safetensors' name.
    """

    rank: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    planned: RankTensor
    format: str = "none"
    suffix: str = WEIGHT


def stored_tensors(tensors: Iterable[RankTensor], scheme: Scheme, dtype: str) -> Iterator[StoredTensor]:
    """All tensors of all rank files.

    Args:
        tensors: the plan of plain tensors.
        dtype: safetensors' name of the checkpoint's type.

    Raises:
        RecipeError: parts of one linear have different formats.
    """
    for tensor in tensors:
        linear = tensor.linear
        name = "none" if linear is None else linear_format(linear, scheme)
        if name in PLAIN:
            yield StoredTensor(tensor.rank, tensor.name, tensor.shape, tensor.dtype or dtype, tensor, name)
        else:
            for suffix, (kind, shape) in _linear_tensors(tensor, name, scheme.group_size, dtype).items():
                full = f"{tensor.name.removesuffix(WEIGHT)}{suffix}"
                yield StoredTensor(tensor.rank, full, shape, kind, tensor, name, suffix)
        if linear is not None and linear.split == "qkv" and scheme.kv_cache != "none":
            attention = linear.module.rpartition(".")[0]
            for suffix in CACHE_SCALES:
                yield StoredTensor(tensor.rank, f"{attention}.{suffix}", (1,), "F32", tensor, suffix=suffix)


def linear_format(linear: Linear, scheme: Scheme) -> str:
    """The one format of all parts of a linear.

    Raises:
        RecipeError: they have different ones.
    """
    formats = {scheme.format_of(part.module): part.module for part in linear.parts}
    if len(formats) > 1:
        listed = ", ".join(f"{module}: {name}" for name, module in formats.items())
        raise RecipeError(
            f"{linear.module} is made of layers with different formats ({listed})",
            why="TensorRT-LLM stacks them into one matrix, which has one format",
            next="let a pattern of quantization.exclude or quantization.overrides name all of them or none",
        )
    return next(iter(formats))


def _linear_tensors(tensor: RankTensor, name: str, group: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    *experts, out, columns = tensor.shape
    stack = tuple(experts)
    one = (*stack, 1)
    if name == "fp8":
        return {WEIGHT: ("F8_E4M3", tensor.shape), SCALE: ("F32", one), INPUT_SCALE: ("F32", (1,))}
    if name == "fp8_pc_pt":
        return {WEIGHT: ("F8_E4M3", tensor.shape), ROW_SCALE: ("F32", (*stack, out))}
    if name == "int8_sq":
        return {
            WEIGHT: ("I8", tensor.shape),
            SCALE: ("F32", (*stack, out)),
            INPUT_SCALE: ("F32", (1,)),
            FACTORS: (dtype, (columns,)),
        }
    if name in NVFP4:
        found = {
            WEIGHT: ("U8", (*stack, out, columns // 2)),
            SCALE: ("F8_E4M3", (*stack, out, columns // BLOCK)),
            SCALE_2: ("F32", stack),
        }
        return found | ({INPUT_SCALE: ("F32", (1,) if stack else ())} if name == "nvfp4" else {})
    found = {WEIGHT: ("I8", (*stack, out // 2, columns)), SCALE: ("F32", (*stack, out, columns // group))}
    if name == "int4_rtn":
        return found
    found[FACTORS] = (dtype, (*stack, columns))
    return found | ({SCALE_2: ("F32", one), INPUT_SCALE: ("F32", (1,))} if name == "w4a8_awq" else {})


def check_storable(tensors: Iterable[RankTensor], scheme: Scheme) -> None:
    """Refuse sizes that a format's groups and bytes cannot hold, and mixtures of experts where it has none.

    Raises:
        SourceError: names the linear and the size.
    """
    for tensor in tensors:
        if tensor.linear is None:
            continue
        name = linear_format(tensor.linear, scheme)
        if name in PLAIN:
            continue
        columns = tensor.shape[-1]
        group = scheme.group_size if name in INT4 else BLOCK if name in NVFP4 else 1
        where = f"{tensor.linear.parts[0].module} ({tensor.linear.module})"
        if columns % group:
            raise SourceError(
                f"{where} has {columns} input features on each rank, {name} needs a multiple of {group}",
                why=f"{group} input features share a scale",
                next="choose a format without groups, fewer ranks, or a smaller quantization.group_size",
            )
        if name in INT4 and any(
            (piece.at | piece.part_row | (piece.rows[1] - piece.rows[0])) % 2 for piece in tensor.pieces
        ):
            raise SourceError(
                f"{where} has an odd number of output features in a part, {name} needs an even one",
                why="two rows share a byte",
                next="choose another format",
            )
        if name == "int8_sq" and tensor.linear.parts[0].expert is not None:
            raise SourceError(
                f"{where} is a mixture of experts, which {name} does not have",
                why="neither ModelOpt nor TensorRT-LLM has SmoothQuant for experts",
                next="choose fp8, int4_awq or w4a8_awq",
            )
