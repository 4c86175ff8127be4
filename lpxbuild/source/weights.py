"""The tensors in the files against the tensors that the config promises."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lpxbuild.errors import SourceError
from lpxbuild.families import IGNORED_SUFFIXES, Family, ModelShape, TensorSpec
from lpxbuild.source.records import TensorEntry

if TYPE_CHECKING:
    from lpxbuild.source.quantized import ExpectedTensor, SourceQuantization

FLOAT_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BLOCK = 8 << 20  # bytes compared at once


def stored_dtype(tensors: Mapping[str, TensorEntry]) -> str | None:
    """The dtype that most bytes of the files have, None where no tensor is floating point."""
    sizes: Counter[str] = Counter()
    for entry in tensors.values():
        if entry.dtype in FLOAT_DTYPES:
            sizes[FLOAT_DTYPES[entry.dtype]] += entry.nbytes
    return max(sizes, key=lambda name: (sizes[name], name)) if sizes else None


def match_tensors(
    tensors: Mapping[str, TensorEntry],
    family: Family,
    shape: ModelShape,
    *,
    download: str,
    quantization: SourceQuantization | None = None,
) -> tuple[dict[str, TensorEntry], list[str]]:
    """The model's tensors, and notices about others that are left out.

    Known-harmless buffers (rotary `inv_freq` and the like) are left out quietly.

    Raises:
        SourceError: a tensor is absent, has another shape or dtype, or is unknown and inside the model.
    """
    tensors = with_prefix(tensors, family)
    ignored = (*IGNORED_SUFFIXES, *family.ignored)
    _check_layers(tensors, family, shape, ignored, download)
    expected = family.tensors(shape)
    stored = quantization.expected if quantization is not None else {}
    if quantization is not None:
        expected = {n: spec for n, spec in expected.items() if n.removesuffix(".weight") not in quantization.linears}
        _check_quantized(stored, tensors, family, shape, download)
    for name, spec in expected.items():
        entry = tensors.get(name)
        if entry is None:
            if spec.required:
                raise _absent(name, tensors, family, shape, download)
        elif entry.shape != spec.shape:
            raise _wrong_shape(name, spec, entry, family, shape)
        elif entry.dtype not in FLOAT_DTYPES:
            raise SourceError(
                f"tensor {name} in {entry.file.name} has dtype {entry.dtype}",
                why=f"lpx reads {', '.join(FLOAT_DTYPES)}; integers and 8-bit floats mean quantized weights",
                next="give the original, unquantized model as model.source",
            )
    unknown = sorted(n for n in tensors if n not in expected and n not in stored and not n.endswith(ignored))
    inside = [name for name in unknown if name.startswith(family.roots)]
    if inside:
        raise SourceError(
            f"tensor {inside[0]} is not part of a {family.name} model as config.json describes it"
            + (f" (and {len(inside) - 1} more: {', '.join(inside[1:6])})" if len(inside) > 1 else ""),
            why="leaving it out would make another model",
            next="check that config.json belongs to these weights, or that the architecture is the right one",
        )
    notices = []
    if unknown:
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        notices.append(f"left out, not part of a {family.name} model: {', '.join(unknown[:8])}{more}")
    return {name: tensors[name] for name in (*expected, *stored) if name in tensors}, notices


def with_prefix(tensors: Mapping[str, TensorEntry], family: Family) -> Mapping[str, TensorEntry]:
    """The tensors under transformers' names, where files on the hub were written without the first word of them."""
    short = family.embedding.removeprefix(family.prefix)
    if not family.prefix or family.embedding in tensors or short not in tensors:
        return tensors
    return {name if name.startswith(family.roots) else family.prefix + name: entry for name, entry in tensors.items()}


def _check_quantized(
    stored: Mapping[str, ExpectedTensor],
    tensors: Mapping[str, TensorEntry],
    family: Family,
    shape: ModelShape,
    download: str,
) -> None:
    for name, spec in stored.items():
        entry = tensors.get(name)
        if entry is None:
            if spec.required:
                raise _absent(name, tensors, family, shape, download)
        elif entry.dtype not in spec.dtypes or entry.shape not in spec.shapes:
            shapes = " or ".join(str(list(size)) for size in spec.shapes)
            raise SourceError(
                f"tensor {name} in {entry.file.name} is {entry.dtype} {list(entry.shape)}, "
                f"expected {' or '.join(spec.dtypes)} {shapes}",
                why="the quantization settings of config.json and the weights belong to different models",
                next="compare the folder with the original repository of the model",
            )


def dtype_notices(tensors: Mapping[str, TensorEntry], shape: ModelShape) -> list[str]:
    """Says where the files hold another dtype than the config names."""
    found = Counter(FLOAT_DTYPES[entry.dtype] for entry in tensors.values())
    others = {name: count for name, count in sorted(found.items()) if name != shape.dtype}
    if not others:
        return []
    counts = ", ".join(f"{count} of {len(tensors)} tensors are {name}" for name, count in others.items())
    return [f"config.json says {shape.dtype}, {counts}; model.dtype auto means {shape.dtype}"]


def check_tied_head(tensors: Mapping[str, TensorEntry], family: Family) -> None:
    """Where embeddings are tied and the files hold a head as well, the two must be equal, byte by byte.

    This is the one check that reads weights: 8 MiB at a time, and only for the rare files with a redundant head.

    Raises:
        SourceError: they differ, so `tie_word_embeddings` and the files contradict each other.
    """
    if family.head not in tensors:
        return
    head, embedding = tensors[family.head], tensors[family.embedding]
    equal = head.dtype == embedding.dtype and head.nbytes == embedding.nbytes
    if equal:
        with head.file.open("rb") as one, embedding.file.open("rb") as other:
            one.seek(head.begin)
            other.seek(embedding.begin)
            left = head.nbytes
            while equal and left:
                size = min(_BLOCK, left)
                equal = one.read(size) == other.read(size)
                left -= size
    if not equal:
        raise SourceError(
            f"{family.head} differs from {family.embedding}, but config.json says tie_word_embeddings true",
            why="a tied model has one matrix for both; which of the two is meant cannot be known",
            next="set tie_word_embeddings to false in config.json if the head was trained, or remove it from the files",
        )


def _layer(name: str, family: Family) -> int | None:
    found = re.match(rf"{re.escape(family.layer_prefix)}(\d+)\.", name)
    return int(found[1]) if found else None


def _check_layers(
    tensors: Mapping[str, TensorEntry], family: Family, shape: ModelShape, ignored: tuple[str, ...], download: str
) -> None:
    layers = {name: layer for name in tensors if (layer := _layer(name, family)) is not None}
    found = set(layers.values())
    # One by one: the number in config.json may be anything.
    missing = next((layer for layer in range(shape.num_hidden_layers) if layer not in found), None)
    if missing is not None:
        raise SourceError(
            f"layer {missing} ({family.layer_prefix}{missing}) is missing: config.json says num_hidden_layers "
            f"{shape.num_hidden_layers}, the files hold {len(found)}",
            why="the weights are incomplete, or config.json belongs to another model",
            next=download,
        )
    learned = {layer for name, layer in layers.items() if not name.endswith(ignored)}
    extra = sorted(layer for layer in learned if layer >= shape.num_hidden_layers)
    if extra:
        raise SourceError(
            f"the files hold layer {extra[0]} ({family.layer_prefix}{extra[0]}), config.json says num_hidden_layers "
            f"{shape.num_hidden_layers}",
            why="config.json belongs to another model, or the extra layers are of a kind lpx does not know",
            next="compare config.json with the original repository of the model",
        )


def _absent(
    name: str, tensors: Mapping[str, TensorEntry], family: Family, shape: ModelShape, download: str
) -> SourceError:
    if name == family.head:
        return SourceError(
            f"{name} is missing and config.json says tie_word_embeddings {str(shape.tie_word_embeddings).lower()}",
            why="an untied model has a head of its own; taking the embedding in its place would make junk",
            next=f"{download}   (or set tie_word_embeddings to true in config.json if the model is tied)",
        )
    layer = _layer(name, family)
    place = f" (layer {layer})" if layer is not None else ""
    return SourceError(
        f"tensor {name}{place} is missing: none of the {len(_files(tensors))} weight files holds it",
        why=f"config.json describes a {shape.architecture} that needs it",
        next=download,
    )


def _wrong_shape(name: str, spec: TensorSpec, entry: TensorEntry, family: Family, shape: ModelShape) -> SourceError:
    what = f"tensor {name} in {entry.file.name} has shape {list(entry.shape)}, config.json means {list(spec.shape)}"
    if name in (family.embedding, family.head) and len(entry.shape) == 2 and entry.shape[0] != shape.vocab_size:
        return SourceError(
            f"{what}: {entry.shape[0]} rows in the file, vocab_size {shape.vocab_size} in config.json",
            why="tokens were added without saving config.json again, or the two belong to different models",
            next=f"set vocab_size to {entry.shape[0]} in config.json if the weights are right",
        )
    return SourceError(
        what,
        why="config.json and the weights belong to different models, or head_dim or num_key_value_heads is wrong",
        next="compare config.json with the original repository of the model",
    )


def _files(tensors: Mapping[str, TensorEntry]) -> set[Path]:
    return {entry.file for entry in tensors.values()}
