"""Sizes and models that the quantized kernels of TensorRT-LLM can take, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lpxbuild.errors import LpxError, RecipeError, SourceError
from lpxbuild.families import ModelShape, family_named, tensor_parallel_sizes
from lpxbuild.families.weights import WeightRule, dimensions, expert_numbers
from lpxbuild.quantization.formats import FORMATS
from lpxbuild.quantization.scheme import Scheme

GROUP_SIZES = (64, 128)
WEIGHT_ONLY_MULTIPLE = 64
W4A8_GROUP = 128
NVFP4_BLOCK = 16
INT4_GROUPS = ("int4_rtn", "int4_awq", "w4a8_awq")

KEYS = {
    "hidden": "hidden_size",
    "query": "num_attention_heads × head_dim",
    "intermediate": "intermediate_size",
    "expert_intermediate": "moe_intermediate_size",
    "shared_intermediate": "shared_expert_intermediate_size",
}
QKV = "(num_attention_heads + 2 × num_key_value_heads) × head_dim"

NOT_FOR_EXPERTS = {
    "int8_sq": "neither ModelOpt nor TensorRT-LLM has SmoothQuant for experts",
    "fp8_pc_pt": "TensorRT-LLM's FP8_PER_CHANNEL_PER_TOKEN replaces attention and dense MLP blocks only",
    "w4a8_awq": "TensorRT-LLM's loader divides each expert's scales by one number of shape (1), not by one per expert",
    "nvfp4": "TensorRT-LLM's loader takes NVFP4 weights of two dimensions only",
}


@dataclass(frozen=True)
class _Size:
    """A feature count over all ranks, copies of KV heads included.

    Attributes:
        input: it counts the input features of a linear, which scales are shared along.
        shared_out: it is shared out over the ranks.
    """

    key: str
    value: int
    input: bool
    shared_out: bool


def _sizes(rule: WeightRule, shape: ModelShape, tensor: int) -> list[_Size]:
    """Input and output of a linear."""
    named = dimensions(shape)
    out, into = rule.parts[0].dims
    sizes = [_Size(KEYS[into], named[into], True, rule.split == "row")]
    if rule.split == "qkv":
        copies = max(shape.num_key_value_heads, tensor)
        sizes.append(_Size(QKV, (shape.num_attention_heads + 2 * copies) * shape.head_size, False, True))
    else:
        sizes.append(_Size(KEYS[out], named[out], False, rule.split == "column"))
    return sizes


def _linears(shape: ModelShape, scheme: Scheme) -> Iterator[tuple[WeightRule, str, str]]:
    """(rule, HF module, format) of every linear with another format than its like in the layers before."""
    for rule in family_named(shape.family).rules(shape):
        if not rule.linear or rule.place != "layer":
            continue
        seen = set()
        for layer in range(shape.num_hidden_layers):
            if not rule.in_layer(shape, layer):
                continue
            for expert in expert_numbers(rule, shape):
                module = rule.parts[0].source.format(layer=layer, expert=expert).removesuffix(".weight")
                name = scheme.format_of(module)
                if name not in seen:
                    seen.add(name)
                    yield rule, module, name


def _multiple(size: _Size, name: str, group: int, tensor: int) -> int:
    """What the size has to be a multiple of; 1 = no rule."""
    if name in ("int8_wo", "int4_wo"):
        return WEIGHT_ONLY_MULTIPLE * tensor
    if name in INT4_GROUPS:
        return max(W4A8_GROUP if name == "w4a8_awq" else WEIGHT_ONLY_MULTIPLE, group) * tensor
    if "nvfp4" in name and size.input:
        return NVFP4_BLOCK * (tensor if size.shared_out else 1)
    return 1


def _misfit(shape: ModelShape, scheme: Scheme, tensor: int) -> tuple[_Size, str, int] | None:
    for rule, _, name in _linears(shape, scheme):
        for size in _sizes(rule, shape, tensor):
            multiple = _multiple(size, name, scheme.group_size, tensor)
            if size.value % multiple:
                return size, name, multiple
    return None


def check_shapes(
    shape: ModelShape, scheme: Scheme, tensor_parallel: int, *, loaders: Sequence[str] | None = None
) -> None:
    """Refuse what the kernels of a format cannot take.

    TensorRT-LLM's weight-only linears round in and out features up to multiples of 64 (or of a group) × ranks, but its
    builder does not pad the tensors, so other sizes end in a shape error on the GPU host. `openvino` refuses the same,
    because a rehearsal must not pass what the GPU host would fail.

    Args:
        loaders: of a source that is quantized already: backends that load its files as they are. Its formats are no
            choice of the recipe, so no other is proposed. None = the formats are the recipe's.

    Raises:
        SourceError: names the size, its value, the ranks, and what would work.
        RecipeError: a group size that the format does not have, or a format that the kind of model does not have.
    """
    check_kinds(shape, scheme, loaders=loaders)
    misfit = _misfit(shape, scheme, tensor_parallel)
    if misfit is None:
        return
    size, name, multiple = misfit
    grouped = f" and group_size {scheme.group_size}" if name in INT4_GROUPS else ""
    raise SourceError(
        f"{size.key} {size.value} does not fit {name} with tensor parallel {tensor_parallel} (tp_size){grouped}",
        why=f"the {FORMATS[name].quant_algo} kernels need a multiple of "
        + (f"{multiple // tensor_parallel} × {tensor_parallel} = {multiple}" if multiple != NVFP4_BLOCK else "16"),
        next=_next(shape, scheme, name, tensor_parallel, loaders),
    )


def check_kinds(shape: ModelShape, scheme: Scheme, *, loaders: Sequence[str] | None = None) -> None:
    """The part of `check_shapes` that no size decides: what TensorRT-LLM has no kernels for in this kind of model.

    Raises:
        RecipeError: names the format and what can be chosen instead.
        SourceError: the same, where the source has the format already.
    """
    for rule, module, name in _linears(shape, scheme):
        if name == "w4a8_awq" and scheme.group_size != W4A8_GROUP:
            what = f"quantization.group_size {scheme.group_size} does not fit w4a8_awq"
            why = f"the W4A8_AWQ kernels have groups of {W4A8_GROUP} only"
            choose = f"set quantization.group_size to {W4A8_GROUP}, or quantization.format to int4_awq"
        elif rule.experts and name in NOT_FOR_EXPERTS:
            what = f"quantization.format {name} does not fit {shape.family}: {module} is an expert"
            why = NOT_FOR_EXPERTS[name]
            choose = "set quantization.format to one of: " + ", ".join(
                one for one, row in FORMATS.items() if "tensorrt" in row.backends and one not in NOT_FOR_EXPERTS
            )
        elif name == "fp8_pc_pt" and shape.norm != "rms":
            what = f"quantization.format fp8_pc_pt does not fit {shape.family}, whose norms are LayerNorm"
            why = "TensorRT-LLM's FP8_PER_CHANNEL_PER_TOKEN quantizes the inputs inside RMSNorm"
            choose = "set quantization.format to fp8"
        else:
            continue
        raise _misfitting(what, why, choose, loaders)


def _misfitting(what: str, why: str, choose: str, loaders: Sequence[str] | None) -> LpxError:
    if loaders is None:
        return RecipeError(what, why=why, next=choose)
    own = what.replace("quantization.", "the source's ", 1)
    return SourceError(f"the source is already quantized; {own}", why=why, next=_as_it_is(loaders))


def _as_it_is(loaders: Sequence[str]) -> str:
    """What is left for a source whose own format will not do."""
    original = "give the original, unquantized model as model.source"
    return f"build for backend {' or '.join(loaders)}, or {original}" if loaders else original


def _next(shape: ModelShape, scheme: Scheme, name: str, tensor: int, loaders: Sequence[str] | None) -> str:
    ways = []
    ranks = _working(shape, scheme, tensor_parallel_sizes(shape))
    if ranks:
        ways.append(f"set parallel.tensor to one of: {', '.join(map(str, ranks))}")
    if loaders is not None:
        return ", or ".join([*ways, _as_it_is(loaders)])
    if name in ("int4_rtn", "int4_awq"):
        groups = [
            group
            for group in GROUP_SIZES
            if group != scheme.group_size and _misfit(shape, replace(scheme, group_size=group), tensor) is None
        ]
        if groups:
            ways.append(f"set quantization.group_size to {' or '.join(map(str, groups))}")
    if not ways:
        return "set quantization.format to none: no tensor parallel size of this model fits"
    return ", or ".join([*ways, "quantization.format to none"])


def _working(shape: ModelShape, scheme: Scheme, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if _misfit(shape, scheme, size) is None]
