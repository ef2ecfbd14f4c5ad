"""AdaRound once more in numpy float64, written from the paper's equations [AR eq. 21-25] and not from the code under test."""

import itertools
import math

import numpy as np

ZETA, GAMMA = 1.1, -0.1


def h(v):
    """Eq. 23."""
    return np.clip(1 / (1 + np.exp(-v)) * (ZETA - GAMMA) + GAMMA, 0.0, 1.0)


def soft(w, s, v, n, p):
    """Eq. 22."""
    return s * np.clip(np.floor(w / s) + h(v), n, p)


def f(v, beta):
    """Eq. 24."""
    return (1 - np.abs(2 * h(v) - 1) ** beta).sum()


def beta_at(step, steps, warm_up, first, last):
    begin = warm_up * steps
    if step < begin:
        return None
    return last + (first - last) * 0.5 * (1 + math.cos(math.pi * (step - begin) / (steps - 1 - begin)))


def best_rounding(w, s, n, p, error):
    """The codes (the shape of w) with the least error(codes) of all 2^size choices of floor and ceil, and that error."""
    lower = np.floor(w / s)
    choices = [lower + np.reshape(c, w.shape) for c in itertools.product((0, 1), repeat=w.size)]
    every = [np.clip(c, n, p) for c in choices]
    errors = [error(codes) for codes in every]
    best = int(np.argmin(errors))
    return every[best], errors[best]
