"""Judges the points of a model one by one; each was computed from the reference's values before it.

So an error does not travel: what is wrong is wrong in the module that made it. A point's floor depends on what lies
between it and the points before: a linear layer in some format, stored vectors, or arithmetic alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpxbuild.verify.metrics import Signal, signal
from lpxbuild.verify.thresholds import EXACT, LIMITS, ROUNDED, Floor
from lpxbuild.verify.verdict import Module

_LINEAR = {
    "attention.q": "attention.qkv (q)",
    "attention.k": "attention.qkv (k)",
    "attention.v": "attention.qkv (v)",
    "attention.dense": "attention.dense",
    "mlp.fc": "mlp.fc",
    "mlp.gate": "mlp.fc",
    "mlp.up": "mlp.gate",
}
_VECTORS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_layernorm", "mlp.router": "mlp.router"}
_ARITHMETIC = {
    "attention.context": "attention (positions, mask, scores)",
    "mlp.inner": "mlp (activation)",
    "": "(what the layer adds up, norms after its parts)",
}
_TOP = {"embedding": "transformer.vocab_embedding", "ln_f": "transformer.ln_f", "logits": "lm_head"}
_POINT = re.compile(r"layers\.(\d+)\.?(.*)")
ROOM_DB = 6.0
"""A point behind several noisy linear layers may lose so much more than one of them."""


def judge(
    reference: Mapping[str, Mapping[str, Any]],
    reference_folder: Path,
    candidate: Mapping[str, str],
    candidate_folder: Path,
    *,
    format_of: Callable[[str], str],
    stored: str | None,
    dtype: str,
    fast: bool = False,
) -> Iterator[Module]:
    """Compare every point that both sides have, one at a time.

    Args:
        reference: point → file, module, side.
        candidate: point → file.
        format_of: Hugging Face module → format of its weights.
        stored: type that the source's values were rounded to; None = they are kept bit for bit.
        dtype: of the checkpoint.
        fast: embedding and head are int8 too.
    """
    import numpy as np

    for point in sorted(candidate, key=_order):
        if point not in reference:
            continue
        described = reference[point]
        found = signal(
            np.load(reference_folder / described["file"], mmap_mode="r"),
            np.load(candidate_folder / candidate[point], mmap_mode="r"),
        )
        name, kind = _named(point, reference)
        format_name = format_of(described["linear"]) if kind in ("linear", "several") else "none"
        if fast and point in ("embedding", "logits"):
            kind, format_name = "linear", "int8_wo"
        floor = _floor(kind, format_name, stored, dtype)
        why = _below(found, floor)
        lossy = LIMITS[format_name].lossy if kind in ("linear", "several") else None
        yield Module(
            point=point,
            name=name,
            source=_source(point, described),
            format=format_name,
            snr_db=round(found.snr_db, 2),
            worst_block_db=round(found.worst_block_db, 2),
            gain=round(found.gain, 5),
            floor_db=floor.snr_db,
            ok=not why,
            why=why,
            lossy=_below(found, lossy) if lossy is not None and not why else "",
        )


def _below(found: Signal, floor: Floor) -> str:
    """What does not reach the floor; empty where all does."""
    if found.snr_db < floor.snr_db:
        return f"{found.snr_db:.1f} dB, at least {floor.snr_db:g} are expected"
    if found.worst_block_db < floor.worst_block_db:
        return f"a block of it has {found.worst_block_db:.1f} dB, at least {floor.worst_block_db:g} are expected"
    if abs(found.gain - 1) > floor.gain:
        return f"its size is {found.gain - 1:+.1%} off, at most ±{floor.gain:.1%} is expected"
    return ""


_PARTS = (
    "input_layernorm",
    "attention.q",
    "attention.k",
    "attention.v",
    "attention.context",
    "attention.dense",
    "post_layernorm",
    "mlp.router",
    "mlp.fc",
    "mlp.gate",
    "mlp.up",
    "mlp.inner",
    "mlp",
    "",
)


def _order(point: str) -> tuple[int, int]:
    """In the order in which a model computes."""
    match = _POINT.fullmatch(point)
    if match is None:
        return {"embedding": (-1, 0), "ln_f": (10**9, 0)}.get(point, (10**9, 1))
    return int(match[1]), _PARTS.index(match[2])


def _named(point: str, reference: Mapping[str, Any]) -> tuple[str, str]:
    """TensorRT-LLM's name of what made the point's value, and of which kind that is."""
    if point in _TOP:
        return _TOP[point], "vectors"
    match = _POINT.fullmatch(point)
    assert match is not None
    layer, part = f"transformer.layers.{match[1]}", match[2]
    if part in _LINEAR:
        return f"{layer}.{_LINEAR[part]}", "linear"
    if part in _VECTORS:
        return f"{layer}.{_VECTORS[part]}", "vectors"
    if part == "mlp":
        inner = f"layers.{match[1]}.mlp.inner" in reference
        return (f"{layer}.mlp.proj", "linear") if inner else (f"{layer}.mlp (experts)", "several")
    if part == "attention.context" and f"layers.{match[1]}.attention.q" not in reference:
        return f"{layer}.attention (qkv, positions, mask, scores)", "several"
    if part == "attention.context" and reference[point]["vectors"]:
        return f"{layer}.{_ARITHMETIC[part]}", "vectors"
    if part == "":
        return f"{layer} {_ARITHMETIC[part]}", "vectors"
    return f"{layer}.{_ARITHMETIC[part]}", "arithmetic"


def _floor(kind: str, format_name: str, stored: str | None, dtype: str) -> Floor:
    exact = EXACT if stored is None else ROUNDED.get(stored, EXACT)
    if kind == "arithmetic":
        return EXACT
    if kind == "vectors":
        # A norm that is stored with its 1 added is rounded even where the source has the same type.
        return ROUNDED.get(dtype, exact)
    if format_name == "none":
        return exact
    floor = LIMITS[format_name].floor
    if kind == "several":
        return Floor(floor.snr_db - ROOM_DB, floor.worst_block_db - ROOM_DB, 2 * floor.gain)
    return floor


def _source(point: str, described: Mapping[str, Any]) -> str:
    """The Hugging Face module; a point that is another module's input is named by that."""
    module = str(described["module"])
    return module if described["side"] == "out" else f"input of {module}"
