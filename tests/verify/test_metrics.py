"""Numbers of a comparison against formulas worked out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lpxbuild.verify import metrics
from lpxbuild.verify.metrics import Estimate
from lpxbuild.verify.thresholds import LIMITS, bounds
from lpxbuild.verify.verdict import measure


class Nothing:
    min_agreement = max_kl = max_perplexity_rise = None


def test_two_distributions_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2."""
    p, q = np.log([[0.5, 0.25, 0.25]] * 2), np.log([[0.25, 0.5, 0.25]] * 2) + 7  # logits may be shifted
    found = metrics.compare([(p, q, [2, 1])])
    assert found.kl == pytest.approx([0.25 * math.log(2)] * 2)
    assert found.agree.tolist() == [False, False]
    assert found.reference_loss[0] == pytest.approx(math.log(4))
    assert found.candidate_loss[0] == pytest.approx(math.log(2))
    assert math.isnan(found.reference_loss[1])  # nothing follows the last token
    assert found.finite


def test_a_padded_vocabulary_is_cut_and_long_texts_come_in_blocks() -> None:
    random = np.random.default_rng(0)
    p = random.normal(size=(3 * metrics.ROWS + 5, 11)).astype(np.float32)
    q = np.concatenate([p, np.full((len(p), 5), 50, np.float32)], axis=1)
    found = metrics.compare([(p, q, random.integers(0, 11, len(p)).tolist())])
    assert len(found.kl) == len(p)
    assert found.kl.max() < 1e-9
    assert found.agree.all()


def test_what_is_no_number_is_seen() -> None:
    p = np.zeros((2, 4))
    for bad in (np.nan, np.inf):
        q = p.copy()
        q[1, 2] = bad
        found = metrics.compare([(p, q, [0, 1])])
        assert not found.finite
        assert np.isfinite(found.kl).all()


def test_intervals_hold_the_mean_and_come_out_twice() -> None:
    """Of independent numbers of spread 1, the mean of 1600 has a standard error of 1/40."""
    values = np.random.default_rng(1).normal(3, 1, 1600)
    found = metrics.estimate(values)
    assert found == metrics.estimate(values)
    assert found.low < found.value < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 / 40, rel=0.25)
    assert found.value == pytest.approx(values.mean())
    assert metrics.estimate(np.array([1.0, np.nan, 3.0])).value == 2.0


def test_neighbours_that_depend_on_each_other_widen_the_interval() -> None:
    blocks = np.repeat(np.random.default_rng(2).normal(0, 1, 100), metrics.BLOCK)
    found = metrics.estimate(blocks)
    assert found.high - found.low == pytest.approx(2 * 1.96 / 10, rel=0.35)


def test_signal_by_hand() -> None:
    """A tenth of noise is 20 dB; 5 % too large is 26 dB and a gain of 1.05."""
    wanted = np.random.default_rng(3).normal(size=(50, 128))
    noise = np.random.default_rng(4).normal(size=(50, 128))
    assert metrics.signal(wanted, wanted + 0.1 * noise).snr_db == pytest.approx(20, abs=0.3)
    found = metrics.signal(wanted, 1.05 * wanted)
    assert found.snr_db == pytest.approx(-20 * math.log10(0.05))
    assert found.gain == pytest.approx(1.05)
    assert metrics.signal(wanted, wanted).snr_db == metrics.CEILING


def test_one_huge_token_does_not_decide() -> None:
    """A thousand times larger and 10 % off, beside 99 tokens that are exact: a hundredth of the tokens is 10 % off."""
    wanted = np.random.default_rng(6).normal(size=(100, 64))
    wanted[0] *= 1000
    found = wanted.copy()
    found[0] *= 1.1
    seen = metrics.signal(wanted, found)
    assert seen.gain == pytest.approx(1.001, abs=1e-4)
    assert seen.snr_db == pytest.approx(20 + 20, abs=0.5)


def test_one_wrong_head_of_many_shows_in_its_block() -> None:
    wanted = np.random.default_rng(5).normal(size=(50, 32 * 64))
    found = wanted.copy()
    found[:, 64:128] = wanted[:, :64]
    seen = metrics.signal(wanted, found)
    assert seen.snr_db == pytest.approx(10 * math.log10(32 / 2), abs=0.5)  # over all it is only noise
    assert seen.worst_block_db == pytest.approx(-3, abs=1)


def test_an_interval_decides() -> None:
    """Fail where all of it lies beyond the bound; warn where the value does."""
    cases = {
        (0.01, 0.0, 0.019): "pass",
        (0.03, 0.01, 0.2): "warn",
        (0.16, 0.14, 0.2): "warn",
        (0.2, 0.151, 0.3): "fail",
    }
    for values, status in cases.items():
        assert measure("perplexity rise", Estimate(*values), 0.02, 0.15, above=True).status == status
    assert measure("agreement", Estimate(0.5, 0.4, 0.59), 0.9, 0.6, above=False).status == "fail"
    assert measure("agreement", Estimate(0.61, 0.4, 0.7), 0.9, 0.6, above=False).status == "warn"
    assert measure("agreement", Estimate(0.95, 0.4, 0.99), 0.9, 0.6, above=False).status == "pass"


def test_perplexity_warnings_of_the_calibrated_formats() -> None:
    warnings = {name: LIMITS[name].warn.max_perplexity_rise for name in ("fp8", "int8_sq", "int4_awq")}
    assert warnings == {"fp8": 0.02, "int8_sq": 0.04, "int4_awq": 0.12}


def test_every_format_has_limits_and_the_recipe_goes_before_them() -> None:
    from lpxbuild.quantization import FORMATS

    assert LIMITS.keys() == FORMATS.keys()
    for row in LIMITS.values():
        assert row.fail.max_kl > row.warn.max_kl
        assert row.fail.max_perplexity_rise > row.warn.max_perplexity_rise
        assert row.fail.min_agreement < row.warn.min_agreement

    class Given(Nothing):
        max_kl = 0.5

    warn, fail = bounds(["fp8", "int4_awq"], Given(), Nothing())
    assert warn.max_kl == 0.5
    assert warn.max_perplexity_rise == 0.12  # the more tolerant one of two formats
    assert fail == LIMITS["int4_awq"].fail
