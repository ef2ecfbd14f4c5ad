"""What seeds allow to be said: intervals of means, paired tests, and their correction for several comparisons.

Student (1908) for the interval and the paired test, through scipy; Holm (Scand. J. Statist. 6, 1979) for the correction. Accuracies are
fractions, and so are the differences and half widths here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
ALPHA = 0.05
ONE_SIDED = ALPHA / 2  # level of a test that looks at one side alone: about two standard errors
SAME = 1e-12  # differences of accuracies that spread by less than this are the same, written in float64


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds and the half width of its 95 % interval; None without a spread to make one of: one seed, or all equal."""

    mean: float
    half: float | None
    n: int

    @property
    def equal(self) -> bool:
        """Did several seeds give the same?"""
        return self.n > 1 and self.half is None

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


@dataclass(frozen=True)
class Paired:
    """Mean difference over common seeds, its interval and p value; `p` is None where `why` says that nothing can be tested."""

    difference: Estimate | None
    p: float | None
    why: str = ""


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and t interval.

    Raises:
        ValueError: no values.
    """
    if not len(values):
        raise ValueError("a mean of no values")
    array = np.asarray(values, dtype=np.float64)
    if np.ptp(array) <= SAME:  # accuracies are counts: equal ones do not mean that another seed gives the same
        return Estimate(float(array.mean()), None, len(array))
    error = array.std(ddof=1) / np.sqrt(len(array))
    return Estimate(float(array.mean()), float(stats.t.ppf((1 + LEVEL) / 2, len(array) - 1) * error), len(array))


def paired(values: Sequence[float], base: Sequence[float]) -> Paired:
    """values - base, seed by seed: t test of a mean difference of 0, two-sided.

    A difference that is the same in every seed has no spread to be judged by. Where it is 0 the p value is 1; else there is none, because
    accuracies are counts, and two or three equal differences of counts are no proof.

    Args:
        values, base: of the same seeds, in the same order.
    """
    if len(values) != len(base):
        raise ValueError(f"{len(values)} values against {len(base)}")
    if not len(values):
        return Paired(None, None, "no seed in common")
    differences = np.asarray(values, dtype=np.float64) - np.asarray(base, dtype=np.float64)
    found = estimate(differences.tolist())
    if found.n == 1:
        return Paired(found, None, "one seed")
    if np.ptp(differences) <= SAME:
        if abs(found.mean) <= SAME:
            return Paired(Estimate(0.0, None, found.n), 1.0)
        return Paired(found, None, "the same difference in every seed")
    return Paired(found, float(stats.ttest_1samp(differences, 0.0).pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values in the order given: the k-th smallest of m times m - k + 1, never below a smaller one's, at most 1."""
    order = np.argsort(p_values, kind="stable")
    raised = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1.0)
    return adjusted.tolist()
