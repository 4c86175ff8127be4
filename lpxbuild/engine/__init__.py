"""Engines: a TensorRT-LLM checkpoint becomes something that a backend executes.

One entry of `BACKENDS` per backend; its module is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from lpxbuild.errors import RecipeError, SourceError
from lpxbuild.families import ModelShape
from lpxbuild.output import Output


class Limits(Protocol):
    """Sizes in requests and tokens; the recipe's `limits`."""

    @property
    def max_batch_size(self) -> int: ...
    @property
    def max_input_len(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def max_num_tokens(self) -> int: ...
    @property
    def max_beam_width(self) -> int: ...


class Runtime(Protocol):
    """How the engine will run; the recipe's `runtime`. Cache in bytes; threads None = all cores."""

    @property
    def precision(self) -> str: ...
    @property
    def threads(self) -> int | None: ...
    @property
    def kv_cache_bytes(self) -> int: ...
    @property
    def enable_kv_cache_reuse(self) -> bool: ...
    @property
    def enable_chunked_context(self) -> bool: ...


@dataclass(frozen=True)
class EngineReport:
    """What was compiled.

    Args:
        executor: the runtime loop that runs it ("paged": requests join a running batch; "stateful": one request
            after the other).
        precision: "exact" or "fast".
        weight_bytes: size of the stored weights.
        kv_blocks: blocks of the paged KV cache; 0 with the stateful executor, whose cache grows with its request.
        attention_features: what the model's attention does beyond plain causal attention ("sliding_window"); all of it
            is executed exactly.
        weights: quantization format -> how the graph keeps the weights of its linear layers.
        activations, kv_cache: what they are computed and kept in, whatever the format says: activation scales and
            scales of the KV cache are not applied.
    """

    executor: str
    precision: str
    weight_bytes: int
    kv_blocks: int
    attention_features: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    activations: str = "float32"
    kv_cache: str = "float32"


@dataclass(frozen=True)
class Backend:
    """Where a backend's compiler lives, and which attention features it executes exactly.

    Args:
        module: has `compile_engine(checkpoint, destination, *, limits, runtime, output) -> EngineReport`.
        attention: feature -> executor. A feature that is absent is refused. How each was measured:
            docs/attention-features.md.
        refused: feature -> why, for features that are not executed exactly.
        advice: refused feature -> what to do.
    """

    module: str
    attention: Mapping[str, str]
    refused: Mapping[str, str]
    advice: Mapping[str, str] = field(default_factory=dict)


BACKENDS: dict[str, Backend] = {
    "openvino": Backend(
        module="lpxbuild.engine.openvino.compile",
        attention={
            "sliding_window": "paged",
            "mixed_layers": "paged",
            "two_rope_bases": "paged",
            "soft_cap": "stateful",
            "alibi": "stateful",
        },
        refused={
            "long_rope": "its RoPE factors change when a sequence grows beyond the length that the model was trained "
            "for; transformers computes the whole sequence anew there, which an "
            "engine with a KV cache cannot; up to that length it is exact",
        },
        advice={
            "long_rope": "set limits.max_seq_len to at most original_max_position_embeddings of the model's "
            "config.json (max_position_embeddings where rope_scaling is dynamic)"
        },
    ),
}


def check_features(features: Iterable[str], backend: str) -> str:
    """The executor for a model with these attention features; cheap, called before anything is converted.

    Args:
        features: `attention_features` of the family; empty = plain causal attention.

    Raises:
        RecipeError: this version compiles no engine for the backend.
        SourceError: a feature would only run approximately.
    """
    entry = _backend(backend)
    for feature in features:
        if feature not in entry.attention:
            raise SourceError(
                f"the model uses the attention feature {feature!r}, which backend {backend} does not execute exactly",
                why=entry.refused.get(feature, f"it executes {', '.join(sorted(entry.attention))} and plain attention"),
                next=entry.advice.get(feature, "use another model, or another backend (backend: in the recipe)"),
            )
    executors = {entry.attention[feature] for feature in features} | {"paged"}
    return "stateful" if "stateful" in executors else "paged"


def check_positions(shape: ModelShape, max_seq_len: int) -> None:
    """Refuse sequences longer than a learned table of positions; cheap, called before anything is converted.

    Raises:
        RecipeError: max_seq_len is beyond the table.
    """
    if shape.position == "learned" and max_seq_len > shape.max_position_embeddings:
        raise RecipeError(
            f"limits.max_seq_len {max_seq_len} is beyond the model's {shape.max_position_embeddings} positions",
            why="the model has a learned vector for each position and none beyond",
            next=f"set limits.max_seq_len to at most {shape.max_position_embeddings}",
        )


def compile_engine(
    backend: str, checkpoint: Path, destination: Path, *, limits: Limits, runtime: Runtime, output: Output
) -> EngineReport:
    """Compile a checkpoint folder into `destination`, an existing empty folder that the caller renames when done.

    Raises:
        RecipeError: this version compiles no engine for the backend, or the limits do not fit the KV cache.
        SourceError: the checkpoint is incomplete or uses something that the backend does not execute.
    """
    compiler: Any = import_module(_backend(backend).module)
    report: EngineReport = compiler.compile_engine(
        checkpoint, destination, limits=limits, runtime=runtime, output=output
    )
    return report


def _backend(name: str) -> Backend:
    try:
        return BACKENDS[name]
    except KeyError:
        raise RecipeError(
            f"backend {name!r} cannot be compiled by this version of lpx",
            why=f"it compiles {', '.join(sorted(BACKENDS))}",
            next="set backend: openvino in the recipe, or stop before the engine with --to checkpoint",
        ) from None
