"""What a format may cost: default thresholds of the verdict, and what a sound module of each format keeps.

The perplexity warnings of `fp8` (2 %), `int8_sq` (4 %) and `int4_awq` (12 %) are what these formats should stay
within; a failure is set where an answer is no longer the model's. Floors of modules lie well under what sound ones
measure (docs/verify.md has both) and above what a permuted, missing or exchanged tensor leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """The next-token agreement at least; mean KL divergence (nats) and rise of perplexity (0.02 = 2 %) at most."""

    min_agreement: float
    max_kl: float
    max_perplexity_rise: float


@dataclass(frozen=True)
class Floor:
    """What a module's output must keep: dB over all, dB of its worst block, and how far its gain may be from 1."""

    snr_db: float
    worst_block_db: float
    gain: float


@dataclass(frozen=True)
class FormatLimits:
    """One row of the table.

    Attributes:
        floor: below it a module is wrong.
        lossy: below it a module is named in a warning; None = the format's loss is known well enough for one floor.
    """

    warn: Bounds
    fail: Bounds
    floor: Floor
    lossy: Floor | None = None


_INT4 = FormatLimits(Bounds(0.75, 0.15, 0.12), Bounds(0.3, 0.8, 0.6), Floor(8.0, -1.0, 0.05))
_FP4 = FormatLimits(Bounds(0.75, 0.15, 0.12), Bounds(0.3, 0.8, 0.6), Floor(9.0, -1.0, 0.05))
_FP8 = FormatLimits(Bounds(0.9, 0.03, 0.02), Bounds(0.6, 0.2, 0.15), Floor(22.0, 10.0, 0.02))

LIMITS = MappingProxyType(
    {
        "none": FormatLimits(Bounds(0.98, 0.001, 0.002), Bounds(0.9, 0.02, 0.02), Floor(42.0, 30.0, 0.01)),
        "int8_wo": FormatLimits(Bounds(0.95, 0.02, 0.01), Bounds(0.7, 0.15, 0.10), Floor(28.0, 15.0, 0.015)),
        "int4_wo": FormatLimits(Bounds(0.6, 0.5, 0.5), Bounds(0.1, 2.5, 3.0), Floor(4.0, -2.0, 0.10)),
        "int4_rtn": _INT4,
        "int4_awq": _INT4,
        "w4a8_awq": _INT4,
        # What SmoothQuant loses depends on how far its factors lie apart: SmolLM2 has modules with 5 dB, and so does
        # the same arithmetic written anew. So only what no rounding explains is wrong; the rest is said.
        "int8_sq": FormatLimits(
            Bounds(0.88, 0.05, 0.04), Bounds(0.6, 0.3, 0.2), Floor(3.0, -2.0, 0.3), lossy=Floor(24.0, 10.0, 0.02)
        ),
        "fp8": _FP8,
        "fp8_pc_pt": _FP8,
        "nvfp4": _FP4,
        "w4a16_nvfp4": _FP4,
    }
)
"""By format. A scheme of several formats is measured by the most tolerant of them."""

EXACT = Floor(80.0, 60.0, 0.001)
"""Of what is computed between linear layers in float32, and of weights that are kept bit for bit."""

ROUNDED = MappingProxyType({"float16": Floor(52.0, 40.0, 0.005), "bfloat16": LIMITS["none"].floor})
"""Of weights that were rounded to another type."""


def bounds(formats: Iterable[str], warn: Any, fail: Any) -> tuple[Bounds, Bounds]:
    """(warn, fail) of a scheme; what the recipe's `verify.warn` and `verify.fail` give goes before the defaults."""
    rows = [LIMITS[name] for name in formats]

    def merged(which: str, given: Any) -> Bounds:
        defaults = [getattr(row, which) for row in rows]
        values = {
            "min_agreement": min(row.min_agreement for row in defaults),
            "max_kl": max(row.max_kl for row in defaults),
            "max_perplexity_rise": max(row.max_perplexity_rise for row in defaults),
        }
        for name in values:
            if getattr(given, name) is not None:
                values[name] = getattr(given, name)
        return Bounds(**values)

    return merged("warn", warn), merged("fail", fail)


def markdown_table() -> str:
    """The table for the docs."""
    lines = [
        "| format | warns: agreement, KL, perplexity | fails | floor of a module | of its worst block | gain |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in LIMITS.items():
        cells = [
            f"< {b.min_agreement:.0%}, > {b.max_kl:g}, > +{b.max_perplexity_rise:.3g}".replace(
                f"+{b.max_perplexity_rise:.3g}", f"+{100 * b.max_perplexity_rise:g} %"
            )
            for b in (row.warn, row.fail)
        ]
        floors = [row.floor] if row.lossy is None else [row.floor, row.lossy]
        snr = ", lossy ".join(f"{floor.snr_db:g} dB" for floor in floors)
        block = ", lossy ".join(f"{floor.worst_block_db:g} dB" for floor in floors)
        gain = ", lossy ".join(f"±{100 * floor.gain:g} %" for floor in floors)
        lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {snr} | {block} | {gain} |")
    return "\n".join(lines) + "\n"
