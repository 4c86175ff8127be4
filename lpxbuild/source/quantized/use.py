"""Whether a recipe can have a quantized source: the layout, the format, the split; before a weight is read."""

from __future__ import annotations

from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families import Family, ModelShape, family_named
from lpxbuild.quantization.formats import FORMATS, Layout
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.quantization.sizes import check_kinds
from lpxbuild.source.quantized.integers import IntLinear
from lpxbuild.source.quantized.method import ORIGINAL, groups_for_tensorrt
from lpxbuild.source.quantized.modules import Modules, modules_of
from lpxbuild.source.quantized.reading import read_quantization
from lpxbuild.source.quantized.records import QuantizedLinear, Read, SourceQuantization
from lpxbuild.source.quantized.settings import Settings

LAYOUTS: dict[Layout, str] = {
    "tensorrt_llm": "TensorRT-LLM checkpoint (backends tensorrt and openvino)",
    "unified_hf": "unified Hugging Face checkpoint (backends pytorch and vllm)",
}

RENAMED = ("fp8", "fp8_pc_pt", "nvfp4", "int4_rtn")
"""Formats that backend pytorch loads under ModelOpt's names, whoever made the weights."""


def check_settings(
    settings: Settings,
    family: Family,
    shape: ModelShape,
    *,
    layout: Layout | None,
    scheme: Scheme | None,
    backend: str | None = None,
) -> None:
    """Refuse what config.json alone tells, before the weight files are opened at all.

    Raises:
        SourceError: as `check_use`, as far as no tensor is needed to know it.
    """
    quantization = read_quantization(settings, family, shape, {})
    if scheme is not None:
        _check_scheme(quantization, scheme)
    if layout is not None:
        _check_layout(quantization, shape, layout, backend)
    if layout == "tensorrt_llm" and backend is not None:
        check_kinds(shape, quantization.scheme, loaders=quantization.loaders)


def check_use(
    quantization: SourceQuantization,
    family: Family,
    shape: ModelShape,
    *,
    layout: Layout | None,
    scheme: Scheme | None,
    backend: str | None = None,
    tensor_parallel: int = 1,
) -> None:
    """Refuse what cannot be made of a quantized source.

    Args:
        layout: what the recipe's backend takes; None = nothing is to be made of it.
        scheme: the recipe's; format "none" and the source's own format both mean: as it is. None = not asked.
        backend: who executes the TensorRT-LLM checkpoint; None = whoever can.

    Raises:
        SourceError: a second quantization, a layout that cannot hold it, groups that a split would cut.
    """
    if scheme is not None:
        _check_scheme(quantization, scheme)
    if layout is not None:
        _check_layout(quantization, shape, layout, backend)
    if layout == "tensorrt_llm":
        modules = modules_of(family, shape)
        if modules.head[0] in quantization.linears:
            why = f"its {modules.head[0]} is quantized as well, which lpx writes plain there"
            raise _wrong_layout(quantization, layout, why, "build for backend pytorch or vllm")
        if backend is not None:
            check_kinds(shape, quantization.scheme, loaders=quantization.loaders)
        _check_parts(quantization, modules)
        _check_groups(quantization, shape, tensor_parallel)


def check_contents(quantization: SourceQuantization, read: Read, *, most_bytes: int | None = None) -> None:
    """Refuse what only small tensors of the files tell: zero points of a symmetric model, an order of the groups.

    Args:
        most_bytes: tensors of further modules are left for later once so much was read; None = all are looked at.

    Raises:
        SourceError: names the tensor.
    """
    seen = 0

    def counted(name: str) -> Any:
        nonlocal seen
        values = read(name)
        seen += values.nbytes
        return values

    for linear in quantization.linears.values():
        if most_bytes is not None and seen >= most_bytes:
            return
        wrong = linear.check_contents(counted) if isinstance(linear, IntLinear) else None
        if wrong is not None:
            raise SourceError(
                f"the source is already quantized ({quantization.title}), and {wrong}",
                why="the settings in config.json say otherwise",
                next="give the original, unquantized model as model.source",
            )


def renamed(quantization: SourceQuantization, shape: ModelShape, backend: str | None) -> bool:
    """Whether a backend gets the weights under ModelOpt's names, because it does not know the source's own."""
    if backend != "pytorch" or backend in quantization.loaders:
        return False
    layers = modules_of(family_named(shape.family), shape).shapes
    return all(name in layers and _has_form(linear) for name, linear in quantization.linears.items())


def _has_form(linear: QuantizedLinear) -> bool:
    if isinstance(linear, IntLinear) and groups_for_tensorrt(linear.group_size, linear.shape[1]) is None:
        return False
    return linear.format in RENAMED


def check_backend(quantization: SourceQuantization, shape: ModelShape, backend: str | None) -> None:
    """Refuse a backend of unified checkpoints that is not known to load the weights in any form.

    Raises:
        SourceError: names the backends that are.
    """
    loaders = quantization.loaders
    if backend is None or backend in loaders or renamed(quantization, shape, backend):
        return
    raise _refused(
        quantization,
        f"backend {backend} is not known to load weights of this kind",
        f"backends that are: {', '.join(loaders) or 'none'}",
        f"set backend to {' or '.join(loaders)}, or {ORIGINAL}" if loaders else ORIGINAL,
    )


def _check_layout(quantization: SourceQuantization, shape: ModelShape, layout: Layout, backend: str | None) -> None:
    if layout in quantization.refused:
        raise _wrong_layout(quantization, layout, *quantization.refused[layout])
    if layout == "unified_hf":
        check_backend(quantization, shape, backend)
    for name in quantization.scheme.formats if layout == "tensorrt_llm" else ():
        if layout not in FORMATS[name].layouts:
            why = f"its format is {name}, which that layout does not have"
            raise _wrong_layout(quantization, layout, why, "build for backend pytorch or vllm")
        if layout == "tensorrt_llm" and backend is not None and backend not in FORMATS[name].backends:
            why = f"backend {backend} does not execute {name}; backends that do: {', '.join(FORMATS[name].backends)}"
            raise _wrong_layout(quantization, layout, why, "choose another backend")


def _wrong_layout(quantization: SourceQuantization, layout: Layout, why: str, following: str) -> SourceError:
    return _refused(quantization, f"it cannot become a {LAYOUTS[layout]}", why, following)


def _check_scheme(quantization: SourceQuantization, scheme: Scheme) -> None:
    own = quantization.format or "none"
    asked = [name for name in scheme.formats if name not in ("none", own, _relative(own))]
    if asked:
        raise _refused(
            quantization,
            f"quantization.format {asked[0]} would quantize it a second time",
            "what the first quantization lost cannot come back, and the second would add its own loss",
            f"set quantization.format to none, which keeps the source's, or {ORIGINAL}",
        )
    if scheme.mixed:
        raise _refused(
            quantization,
            "quantization.exclude and quantization.overrides cannot change what it has",
            "each layer keeps the format that the source gives it",
            f"remove them from the recipe, or {ORIGINAL}",
        )
    if scheme.kv_cache not in ("none", quantization.kv_cache):
        raise _refused(
            quantization,
            f"quantization.kv_cache is {scheme.kv_cache}, the source's is {quantization.kv_cache}",
            "scales of a KV cache come from calibration of the unquantized model",
            f"set quantization.kv_cache to none, which keeps the source's, or {ORIGINAL}",
        )


def _relative(name: str) -> str:
    """The recipe's name for the same kind of weights: integers in groups are int4_awq with or without factors."""
    return {"int4_rtn": "int4_awq", "int4_awq": "int4_rtn"}.get(name, name)


def _check_parts(quantization: SourceQuantization, modules: Modules) -> None:
    """What TensorRT-LLM stacks into one linear has one format: q, k and v, the experts of a layer."""
    for group in modules.together:
        formats = sorted({_format(quantization, name) for name in group})
        if len(formats) > 1:
            why = f"{', '.join(group[:3])} have {' and '.join(formats)}; that layout has one linear for them"
            raise _wrong_layout(quantization, "tensorrt_llm", why, "build for backend pytorch or vllm")


def _format(quantization: SourceQuantization, module: str) -> str:
    linear = quantization.linears.get(module)
    return "none" if linear is None else linear.format or "none"


def _check_groups(quantization: SourceQuantization, shape: ModelShape, tensor: int) -> None:
    """Row-parallel weights are cut along the input: a cut must not go through a group."""
    size = quantization.group_size
    if tensor == 1 or not any(isinstance(linear, IntLinear) for linear in quantization.linears.values()):
        return
    moe = shape.moe
    sizes = {
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads × head_dim": shape.num_attention_heads * shape.head_size,
        "moe_intermediate_size": moe.intermediate_size if moe else 0,
        "shared_expert_intermediate_size": moe.shared_intermediate_size if moe else 0,
    }
    for key, value in sizes.items():
        if value % (tensor * size):
            working = [
                count
                for count in range(1, tensor)
                if all(one % (count * size) == 0 and one % count == 0 for one in sizes.values())
            ]
            raise _refused(
                quantization,
                f"{key} {value} cannot be split over tensor parallel {tensor} (tp_size) with its group_size {size}",
                f"each rank needs whole groups: a multiple of {tensor} × {size}",
                f"set parallel.tensor to one of: {', '.join(map(str, working))}" if working else ORIGINAL,
            )


def _refused(quantization: SourceQuantization, what: str, why: str, following: str) -> SourceError:
    found = f"{quantization.title}: method {quantization.method}, format {quantization.format or 'of its own'}"
    return SourceError(f"the source is already quantized ({found}); {what}", why=why, next=following)
