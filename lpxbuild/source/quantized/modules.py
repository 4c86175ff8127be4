"""Which modules of a model are linear layers, and which of them a list of a quantized source names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lpxbuild.families import Family, ModelShape
from lpxbuild.families.weights import dimensions

WEIGHT = ".weight"


@dataclass(frozen=True)
class Modules:
    """The linear layers of a model by Hugging Face module name.

    Attributes:
        shapes: module → (out, in), of the layers.
        head: name and (out, in) of the output projection; a tied model may have none in its files.
        tied: the head is the embedding.
        attention: the attention module of each layer ("model.layers.0.self_attn").
        together: modules that TensorRT-LLM stacks into one linear (q, k and v; the experts of a layer).
        biased: modules that have a bias in the model.
        transposed: modules of another class than Linear, which hold the matrix as (in, out) (GPT-2's Conv1D).
    """

    shapes: dict[str, tuple[int, int]]
    head: tuple[str, tuple[int, int]]
    tied: bool
    attention: tuple[str, ...]
    together: tuple[tuple[str, ...], ...]
    biased: frozenset[str]
    transposed: frozenset[str]


def modules_of(family: Family, shape: ModelShape) -> Modules:
    """The linear layers of a model, from its family's weight rules."""
    shapes: dict[str, tuple[int, int]] = {}
    attention: dict[str, None] = {}
    together: list[tuple[str, ...]] = []
    biased: set[str] = set()
    transposed: set[str] = set()
    sizes = dimensions(shape)
    head = ("lm_head", (shape.vocab_size, shape.hidden_size))
    for rule in family.rules(shape):
        if rule.place == "last" and rule.tied is not None:
            part = rule.parts[0]
            head = (part.source.removesuffix(WEIGHT), (sizes[part.dims[0]], sizes[part.dims[1]]))
        if rule.place != "layer":
            continue
        for layer in range(shape.num_hidden_layers):
            if not rule.in_layer(shape, layer):
                continue
            found = {name.rpartition(".")[0]: size for name, size in rule.sources(shape, layer)}
            if rule.linear:
                shapes |= {
                    name: (size[1], size[0]) if rule.transposed else (size[0], size[1]) for name, size in found.items()
                }
                together.append(tuple(found))
                transposed |= set(found) if rule.transposed else set()
            elif rule.target.endswith(".bias"):
                biased |= set(found)
            if rule.linear and rule.split == "qkv":
                attention[next(iter(found)).rpartition(".")[0]] = None
    return Modules(
        shapes,
        head,
        shape.tie_word_embeddings,
        tuple(attention),
        tuple(together),
        frozenset(biased),
        frozenset(transposed),
    )


def named_by(module: str, patterns: Iterable[str]) -> bool:
    """Whether a list names a module: itself, a module around it, or by shell patterns (ModelOpt, FP8)."""
    return any(
        module == pattern or module.startswith(f"{pattern}.") or fnmatchcase(module, pattern) for pattern in patterns
    )


def matched_by(module: str, targets: Iterable[str], kind: str = "Linear") -> int:
    """How closely compressed-tensors' targets fit a module: 3 by name, 2 by `re:` pattern, 1 by class, 0 not at all."""
    best = 0
    for target in targets:
        if target == module:
            return 3
        if target.startswith("re:"):
            try:
                found = re.match(target[3:], module) is not None
            except re.error:
                found = False
            best = max(best, 2 * found)
        elif target == kind:
            best = max(best, 1)
    return best


def containing(module: str, fragments: Iterable[str]) -> bool:
    """Whether a fragment stands anywhere in the module's name (AutoAWQ's modules_to_not_convert)."""
    return any(fragment in module for fragment in fragments)
