"""Charts of the HTML report as inline SVG. Colours come from the page's CSS, so that light, dark and paper work."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lpxbuild.verify.metrics import CEILING
from lpxbuild.verify.verdict import Measure, Module

WIDTH = 860
LEFT = 58
SHOWN_DB = 110.0
"""Modules that are better than this are drawn here: float32 arithmetic ends about there."""


def signal_chart(modules: Sequence[Module]) -> str:
    """Signal-to-noise of every module by layer: linear layers and embeddings as dots, wrong ones as crosses."""
    if not modules:
        return ""
    height, bottom, right = 300, 34, 12
    places_of = columns(modules)
    count = max(places_of) + 1
    step = (WIDTH - LEFT - right) / count
    values = [min(module.snr_db, SHOWN_DB) for module in modules]
    low = min(0.0, *values) if min(values) > -CEILING else -10.0
    low = max(low, -10.0)

    def y(db: float) -> float:
        return 10 + (SHOWN_DB - min(max(db, low), SHOWN_DB)) / (SHOWN_DB - low) * (height - bottom - 10)

    parts = []
    for tick in range(0, int(SHOWN_DB) + 1, 20):
        label = f"{tick}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text class="axis" x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    every = max(1, round(count / 16))
    for column in range(count):
        name = "in" if column == 0 else "out" if column == count - 1 else str(column - 1)
        if column in (0, count - 1) or (column - 1) % every == 0:
            x = LEFT + (column + 0.5) * step
            parts.append(f'<text class="axis" x="{x:.1f}" y="{height - 16}" text-anchor="middle">{name}</text>')
    places: dict[int, int] = {}
    totals: dict[int, int] = {}
    for column in places_of:
        totals[column] = totals.get(column, 0) + 1
    for module, column in zip(modules, places_of):
        number = places.get(column, 0)
        places[column] = number + 1
        x = LEFT + (column + (number + 1) / (totals[column] + 1)) * step
        title = f"<title>{escape(module.name)}: {module.snr_db:.1f} dB</title>"
        cy = y(module.snr_db)
        if module.ok:
            parts.append(f'<circle class="{_kind(module)}" cx="{x:.1f}" cy="{cy:.1f}" r="3.2">{title}</circle>')
        else:
            parts.append(
                f'<path class="wrong" d="M{x - 5:.1f} {cy - 5:.1f}l10 10m0 -10l-10 10"><title>'
                f"{escape(module.name)}: {escape(module.why)}</title></path>"
            )
    parts.append(f'<text class="axis" x="{LEFT}" y="{height - 1}">layer</text>')
    parts.append(f'<text class="axis" transform="translate(14 {height / 2:.0f}) rotate(-90)">dB</text>')
    return _svg(height, parts, "Signal-to-noise ratio of every module")


def kl_chart(values: Sequence[float]) -> str:
    """How many tokens have which KL divergence, in half decades."""
    if not values:
        return ""
    edges = [10 ** (-7 + half / 2) for half in range(17)]
    counts = [0] * (len(edges) + 1)
    for value in values:
        counts[sum(value >= edge for edge in edges)] += 1
    height, bottom = 190, 34
    step = (WIDTH - LEFT - 12) / len(counts)
    most = max(counts)
    parts = []
    for index, count in enumerate(counts):
        x, tall = LEFT + index * step, (height - bottom - 24) * count / most
        y = height - bottom - tall
        label = _edge_label(edges, index)
        title = f"<title>{count} tokens, {label}</title>"
        parts.append(
            f'<rect class="bar" x="{x + 2:.1f}" y="{y:.1f}" width="{step - 4:.1f}" height="{tall:.1f}">{title}</rect>'
        )
        if count:
            parts.append(
                f'<text class="axis" x="{x + step / 2:.1f}" y="{y - 4:.1f}" text-anchor="middle">{count}</text>'
            )
    for index in range(0, len(edges), 2):
        x = LEFT + (index + 1) * step
        parts.append(
            f'<text class="axis" x="{x:.1f}" y="{height - 18}" text-anchor="middle">{edges[index]:.0e}</text>'.replace(
                "e-0", "e-"
            ).replace("e+0", "e")
        )
    y = height - bottom
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}"/>')
    parts.append(f'<text class="axis" x="{LEFT}" y="{height - 2}">KL divergence in nats</text>')
    return _svg(height, parts, "Tokens by KL divergence")


def measure_chart(measure: Measure) -> str:
    """The value with its interval on a line, with the bounds for a warning and a failure."""
    height, width = 46, 420
    found = measure.estimate
    points = [found.low, found.high, found.value, measure.warn, measure.fail]
    if measure.name == "next-token agreement":
        low, high = min([*points, 0.9]), 1.0
    else:
        low, high = min(0.0, found.low), max(points)
    span = (high - low) or 1.0
    low, high = low - 0.04 * span, high + 0.04 * span

    def x(value: float) -> float:
        return 10 + (value - low) / (high - low) * (width - 20)

    parts = [f'<line class="base" x1="10" x2="{width - 10}" y1="20" y2="20"/>']
    for name, bound in (("warn", measure.warn), ("fail", measure.fail)):
        at = x(bound)
        anchor = "end" if at > width - 50 else "start" if at < 50 else "middle"
        parts.append(f'<line class="{name}-bound" x1="{at:.1f}" x2="{at:.1f}" y1="8" y2="32"/>')
        parts.append(f'<text class="axis" x="{at:.1f}" y="44" text-anchor="{anchor}">{name}</text>')
    parts.append(f'<line class="interval" x1="{x(found.low):.1f}" x2="{x(found.high):.1f}" y1="20" y2="20"/>')
    parts.append(f'<circle class="value {measure.status}" cx="{x(found.value):.1f}" cy="20" r="5"/>')
    return _svg(height, parts, measure.name, width=width)


def _edge_label(edges: Sequence[float], index: int) -> str:
    if index == 0:
        return f"below {edges[0]:.0e}"
    if index == len(edges):
        return f"{edges[-1]:.0e} and more"
    return f"{edges[index - 1]:.1e} to {edges[index]:.1e}"


def _column(point: str) -> int:
    """0 = before the layers; the last column is found by the caller."""
    parts = point.split(".")
    if parts[0] == "layers":
        return int(parts[1]) + 1
    return 0 if point == "embedding" else _OUT


_OUT = 10**6


def columns(modules: Sequence[Module]) -> list[int]:
    """The column of each module: embedding, layers, what comes after them."""
    found = [_column(module.point) for module in modules]
    last = max((column for column in found if column != _OUT), default=0) + 1
    return [last if column == _OUT else column for column in found]


def _kind(module: Module) -> str:
    return "arithmetic" if module.snr_db > 80 else "dot"


def _svg(height: int, parts: Sequence[str], title: str, *, width: int = WIDTH) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{body}</svg>'
