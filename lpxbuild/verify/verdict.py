"""What a comparison found, as data, as text, and whether it is enough."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lpxbuild.errors import VerdictError
from lpxbuild.verify.metrics import Estimate
from lpxbuild.verify.thresholds import Bounds

Status = Literal["pass", "warn", "fail", "self-consistent"]


@dataclass(frozen=True)
class Measure:
    """One number of the verdict against its bounds.

    Attributes:
        estimate: with its bootstrap interval.
        warn, fail: the bounds; `above`: whether larger is worse.
        status: fail = the whole interval lies beyond `fail`; warn = the value lies beyond `warn`.
    """

    name: str
    estimate: Estimate
    warn: float
    fail: float
    above: bool
    status: Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Module:
    """What one module makes of the reference's values before it.

    Attributes:
        point: where in the model ("layers.1.attention.k").
        name: in words of the checkpoint ("transformer.layers.1.attention.qkv (k)").
        source: the Hugging Face module.
        format: of its weights.
        ok: it keeps what a sound module of its format keeps; `why` not.
        lossy: it loses more than its format should, but not more than rounding can: a warning.
    """

    point: str
    name: str
    source: str
    format: str
    snr_db: float
    worst_block_db: float
    gain: float
    floor_db: float
    ok: bool
    why: str = ""
    lossy: str = ""


@dataclass(frozen=True)
class Answer:
    """Greedy answers to one prompt. `agree`: tokens at the beginning that both say."""

    prompt: str
    reference: str
    candidate: str
    agree: int
    length: int
    complete: bool


@dataclass(frozen=True)
class Verdict:
    """The outcome.

    Attributes:
        status: "self-consistent" = nothing contradicts itself, but nothing was compared; it is no evidence.
        reasons: why it is not "pass", worst first; for "self-consistent", why there was no comparison.
        tokens, text: how much was compared, of what.
        perplexity: (source, candidate).
        max_kl: (nats, the text up to that token).
        modules: all points, in the model's order.
        token_kl: (piece of text, nats) of each compared token, for the report.
        notes: what was not exercised.
        facts: versions, model class, how the reference ran.
    """

    status: Status
    reasons: tuple[str, ...]
    format: str
    tokens: int = 0
    text: str = ""
    measures: tuple[Measure, ...] = ()
    perplexity: tuple[float, float] | None = None
    max_kl: tuple[float, str] | None = None
    modules: tuple[Module, ...] = ()
    answers: tuple[Answer, ...] = ()
    token_kl: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Compared, and not failed."""
        return self.status in ("pass", "warn")

    @property
    def wrong(self) -> tuple[Module, ...]:
        """Modules that do not keep what they must, in the model's order."""
        return tuple(module for module in self.modules if not module.ok)

    @property
    def worst(self) -> Module | None:
        """The linear or norm whose noise is the strongest; None without a comparison."""
        return min(self.wrong or self.modules, key=lambda module: module.snr_db - module.floor_db, default=None)

    def as_dict(self) -> dict[str, Any]:
        """For `--json` and for the manifest; without the texts' tokens."""
        data = asdict(self)
        del data["token_kl"]
        data["ok"] = self.ok
        data["wrong"] = [module.name for module in self.wrong]
        data["worst"] = None if self.worst is None else self.worst.name
        return data

    def summary(self) -> str:
        """One line."""
        if self.status == "self-consistent":
            return f"verify: self-consistent, not compared with the source ({self.reasons[0]})"
        shown = {measure.name: measure.estimate.value for measure in self.measures}
        parts = []
        if shown:
            parts = [
                f"agreement {shown['next-token agreement']:.1%}",
                f"mean KL {shown['mean KL divergence']:.2g} nats",
                f"perplexity {shown['perplexity rise']:+.2%}",
            ]
        if self.wrong:
            parts.append(
                f"wrong: {self.wrong[0].name}" + (f" and {len(self.wrong) - 1} more" if self.wrong[1:] else "")
            )
        return f"verify: {self.status}" + (f" ({', '.join(parts)})" if parts else "")


class VerifyFailed(VerdictError):
    """The verdict is negative, or there is none."""


def measure(name: str, found: Estimate, warn: float, fail: float, *, above: bool) -> Measure:
    """Judge one number."""
    sign = 1 if above else -1
    near = found.low if above else found.high
    status: Literal["pass", "warn", "fail"] = "pass"
    if sign * near > sign * fail:
        status = "fail"
    elif sign * found.value > sign * warn:
        status = "warn"
    return Measure(name, found, warn, fail, above, status)


def measures(agreement: Estimate, kl: Estimate, rise: Estimate, warn: Bounds, fail: Bounds) -> tuple[Measure, ...]:
    """The three numbers that decide."""
    return (
        measure("next-token agreement", agreement, warn.min_agreement, fail.min_agreement, above=False),
        measure("mean KL divergence", kl, warn.max_kl, fail.max_kl, above=True),
        measure("perplexity rise", rise, warn.max_perplexity_rise, fail.max_perplexity_rise, above=True),
    )
