"""Intervals and tests against scipy, tables and arithmetic by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from qat.report.compare_words import shown
from qat.report.statistics import Estimate, estimate, holm, paired


def test_the_interval_of_a_textbook():
    # Student's t at 0.975 with 2 degrees of freedom is 4.302653 (any table); s = 0.01
    found = estimate([0.90, 0.91, 0.92])
    assert (found.mean, found.n) == (pytest.approx(0.91), 3)
    assert found.half == pytest.approx(4.302653 * 0.01 / math.sqrt(3), rel=1e-6)
    assert (found.low, found.high) == (pytest.approx(found.mean - found.half), pytest.approx(found.mean + found.half))


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_the_interval_is_scipys(n):
    values = np.random.default_rng(n).normal(0.9, 0.01, n)
    found = estimate(values.tolist())
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values)))


def test_the_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    inside = [(e := estimate(row)).low <= 0.5 <= e.high for row in generator.normal(0.5, 0.1, (2000, 3))]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)  # three standard errors of a share of 2000


def test_means_without_an_interval():
    assert estimate([0.5]) == Estimate(0.5, None, 1) and estimate([0.5]).low is None
    equal = estimate([0.1 + 0.2, 0.3, 0.3])  # but for the last bit
    assert equal.half is None and equal.equal and shown(equal) == "0.3000 (equal)" and shown(estimate([0.3])) == "0.3000"
    with pytest.raises(ValueError, match="no values"):
        estimate([])


@pytest.mark.parametrize("n", [2, 3, 8])
def test_the_paired_test_is_scipys(n):
    a, b = np.random.default_rng(n).normal(0.9, 0.01, (2, n))
    found = paired(a.tolist(), b.tolist())
    expected = stats.ttest_rel(a, b)
    assert found.p == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval(0.95)
    assert (found.difference.low, found.difference.high) == pytest.approx((interval.low, interval.high))


def test_pairing_sees_what_the_spread_over_seeds_hides():
    base = [0.80, 0.85, 0.90]
    found = paired([b + d for b, d in zip(base, (0.010, 0.011, 0.012))], base)
    # t = 0.011 / (0.001 / sqrt(3)) = 19.05 with 2 degrees of freedom
    assert found.p == pytest.approx(2 * stats.t.sf(0.011 / (0.001 / math.sqrt(3)), 2)) and found.p < 0.01
    assert stats.ttest_ind([b + 0.011 for b in base], base).pvalue > 0.7


def test_pairs_that_cannot_be_tested():
    assert paired([0.9], [0.8]).p is None and paired([0.9], [0.8]).why == "one seed"
    assert paired([], []).difference is None and paired([], []).why == "no seed in common"
    same = paired([0.91, 0.81, 0.71], [0.9, 0.8, 0.7])
    assert same.p is None and same.why == "the same difference in every seed" and same.difference.half is None
    equal = paired([0.1 + 0.2, 0.5], [0.3, 0.5])
    assert equal.p == 1.0 and equal.difference == Estimate(0.0, None, 2)
    with pytest.raises(ValueError, match="2 values against 1"):
        paired([0.1, 0.2], [0.1])


def test_holm_by_hand():
    # 4 x 0.01, 3 x 0.03 and 2 x 0.02 in their order: 0.01 -> 0.04, 0.02 -> 0.06, 0.03 -> 0.06, 0.5 -> 0.5
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == [] and holm([0.02]) == [0.02]


def test_holm_keeps_the_family_wise_error():
    generator = np.random.default_rng(1)
    wrong = [min(holm(row)) < 0.05 for row in generator.uniform(size=(4000, 7))]
    assert np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
