"""The arithmetic of a comparison: next-token distributions, bootstrap intervals, signal-to-noise."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]

ROWS = 64
"""Positions that are compared at a time, so that memory is bounded by the vocabulary and not by the text."""
BLOCK = 16
"""Neighbouring tokens depend on each other: the bootstrap draws blocks of so many."""
RESAMPLES = 2000
SEED = 20240


@dataclass(frozen=True)
class Tokens:
    """Per position of all texts, in nats.

    Attributes:
        kl: KL(reference ‖ candidate) of the distributions of the next token.
        agree: whether both would say the same next token.
        reference_loss, candidate_loss: -log p of the token that comes next, nan at the end of a text.
        finite: whether all logits of the candidate are numbers.
    """

    kl: Array
    agree: Array
    reference_loss: Array
    candidate_loss: Array
    finite: bool


def compare(pairs: list[tuple[Array, Array, list[int]]]) -> Tokens:
    """Compare logits; each pair is (reference, candidate, token ids), logits [tokens, vocabulary], also mapped files.

    A vocabulary that one side pads is cut to the shorter one.
    """
    import numpy as np

    columns: list[list[Array]] = [[], [], [], []]
    finite = True
    for reference, candidate, ids in pairs:
        vocabulary = min(reference.shape[1], candidate.shape[1])
        following = np.array([*ids[1:], -1])
        for begin in range(0, len(ids), ROWS):
            rows = slice(begin, begin + ROWS)
            p = _log_softmax(reference[rows, :vocabulary])
            block = np.asarray(candidate[rows, :vocabulary])
            finite = finite and bool(np.isfinite(block).all())
            q = _log_softmax(np.nan_to_num(block, nan=0.0, posinf=1e30, neginf=-1e30))
            after = following[rows]
            columns[0].append((np.exp(p) * (p - q)).sum(axis=1).clip(min=0.0))
            columns[1].append(p.argmax(axis=1) == q.argmax(axis=1))
            for column, values in ((2, p), (3, q)):
                losses = -values[np.arange(len(after)), np.maximum(after, 0)]
                columns[column].append(np.where(after >= 0, losses, np.nan))
    kl, agree, reference_loss, candidate_loss = (np.concatenate(parts) for parts in columns)
    return Tokens(kl, agree, reference_loss, candidate_loss, finite)


def _log_softmax(logits: Array) -> Array:
    import numpy as np

    values = np.asarray(logits, np.float64)
    values = values - values.max(axis=1, keepdims=True)
    result: Array = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    return result


@dataclass(frozen=True)
class Estimate:
    """A number with the interval that holds 95 of 100 bootstrap resamples."""

    value: float
    low: float
    high: float


def estimate(values: Array, transform: Any = None) -> Estimate:
    """Mean of the values (nan left out) with its interval; `transform` maps means (increasing)."""
    import numpy as np

    values = np.asarray(values, np.float64)
    values = values[~np.isnan(values)]
    blocks = [values[begin : begin + BLOCK] for begin in range(0, len(values), BLOCK)]
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks])
    drawn = np.random.default_rng(SEED).integers(0, len(blocks), (RESAMPLES, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    change = transform or (lambda mean: mean)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(change(values.mean())), float(change(low)), float(change(high)))


@dataclass(frozen=True)
class Signal:
    """How well a module's output is kept, given the reference's input.

    Attributes:
        snr_db: energy of the output over the energy of the difference, in dB (at most CEILING).
        worst_block_db: the same of the worst of up to 64 blocks of neighbouring features: a single wrong head shows.
        gain: 1 where the output has the right size; noise hardly moves it, a wrong scale does.
    """

    snr_db: float
    worst_block_db: float
    gain: float


CEILING = 200.0
BLOCKS = 64
SMALL = 0.05


def signal(reference: Array, candidate: Array) -> Signal:
    """Compare [tokens, features].

    Every token counts the same, whatever its size: a few tokens of a language model carry values a thousand times as
    large as all others, and one rounded weight would decide for the whole module.
    """
    import numpy as np

    if reference.shape != candidate.shape:
        return Signal(-CEILING, -CEILING, 0.0)
    wanted = np.asarray(reference, np.float64)
    found = np.nan_to_num(np.asarray(candidate, np.float64), nan=1e30, posinf=1e30, neginf=-1e30)
    sizes = np.sqrt((wanted**2).mean(axis=1, keepdims=True))
    sizes = np.maximum(sizes, max(1e-3 * float(np.median(sizes)), 1e-30))
    wanted, found = wanted / sizes, found / sizes
    energy = (wanted**2).sum(axis=0)
    with np.errstate(over="ignore"):
        noise = ((found - wanted) ** 2).sum(axis=0)
        gain = float((wanted * found).sum() / max(energy.sum(), 1e-300))
    edges = np.linspace(0, len(energy), min(BLOCKS, len(energy)) + 1).astype(int)
    blocks = [(energy[a:b].sum(), noise[a:b].sum()) for a, b in pairwise(edges)]
    # A block with little output has little signal: rounding alone may drown it, and hurts nobody.
    mean = energy.sum() / max(len(blocks), 1)
    worst = min((_db(e, n) for e, n in blocks if e > SMALL * mean), default=CEILING)
    return Signal(_db(energy.sum(), noise.sum()), worst, gain)


def _db(energy: float, noise: float) -> float:
    import numpy as np

    if noise <= 0:
        return CEILING
    if energy <= 0:
        return -CEILING
    return float(np.clip(10 * np.log10(energy / noise), -CEILING, CEILING))
