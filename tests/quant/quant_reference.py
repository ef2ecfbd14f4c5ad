"""The quantizers once more in numpy float64, written from the equations and not from the code under test."""

import math

import numpy as np


def grid(bits, symmetric, narrow):
    if symmetric:
        return -(2 ** (bits - 1)) + (1 if narrow else 0), 2 ** (bits - 1) - 1
    return 0, 2**bits - 1


def qparams(lo, hi, bits, symmetric, narrow):
    n, p = grid(bits, symmetric, narrow)
    lo, hi = min(float(lo), 0.0), max(float(hi), 0.0)
    if symmetric:
        return max(abs(lo) / abs(n), hi / p), 0
    s = (hi - lo) / p
    return s, int(np.clip(-np.rint(lo / s), n, p))


def fake_quantize(x, s, z, bits, symmetric, narrow):
    n, p = grid(bits, symmetric, narrow)
    return s * (np.clip(np.rint(x / s) + z, n, p) - z)


def percentile(x):
    """The k-th smallest, k = ceil(0.9999 N), and the k-th largest."""
    ordered = np.sort(x.ravel())
    k = math.ceil(len(ordered) * 99.99 / 100)
    return ordered[-k], ordered[k - 1]


def mse(x, bits, symmetric, narrow, steps=40):
    """Search for the least squared error, see `least_error`."""

    def error(lo, hi):
        s, z = qparams(lo, hi, bits, symmetric, narrow)
        return ((fake_quantize(x, s, z, bits, symmetric, narrow) - x) ** 2).sum()

    return *least_error(x, error, symmetric, steps), error


def cross_entropy(x, bits, symmetric, narrow, steps=40):
    """Search for the least cross entropy of the quantized logits x, (N, classes, *), beside the float ones."""

    def logarithm_of_shares(logits):
        shifted = logits - logits.max(1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))

    def error(lo, hi):
        s, z = qparams(lo, hi, bits, symmetric, narrow)
        shares = np.exp(logarithm_of_shares(x))
        return -(shares * logarithm_of_shares(fake_quantize(x, s, z, bits, symmetric, narrow))).sum()

    return *least_error(x, error, symmetric, steps), error


def least_error(x, error, symmetric, steps):
    """Exhaustive search over ratios of the range: both ends together, then hi alone, then lo alone."""
    full_lo, full_hi = min(x.min(), 0.0), max(x.max(), 0.0)
    ratios = [i / steps for i in range(steps, 0, -1)]
    lo, hi = min(((r * full_lo, r * full_hi) for r in ratios), key=lambda ends: error(*ends))
    if not symmetric:
        hi = min((r * full_hi for r in ratios), key=lambda end: error(lo, end))
        lo = min((r * full_lo for r in ratios), key=lambda end: error(end, hi))
    return lo, hi
