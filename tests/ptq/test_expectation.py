"""Means of activated normal variables beside numerical integration and Monte Carlo."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qat.ptq.expectation import expected_clip, expected_leaky_relu, expected_relu

MEANS = torch.tensor([-8.0, -1.0, -0.3, 0.0, 0.2, 2.0, 5.9, 6.0, 9.0], dtype=torch.float64)
STDS = torch.tensor([0.05, 1.0, 3.0], dtype=torch.float64)
SLOPES = torch.linspace(-0.5, 1.5, len(MEANS), dtype=torch.float64)
CASES = {
    "relu": (expected_relu, F.relu),
    "relu6": (lambda m, s: expected_clip(m, s, 0, 6), F.relu6),
    "hardtanh": (lambda m, s: expected_clip(m, s, -1, 1), F.hardtanh),
    "below": (lambda m, s: expected_clip(m, s, hi=0.5), lambda y: y.clamp(max=0.5)),
    "above": (lambda m, s: expected_clip(m, s, lo=-0.5), lambda y: y.clamp(min=-0.5)),
    "crossed": (lambda m, s: expected_clip(m, s, 2, 1), lambda y: y.clamp(2, 1)),
    "none": (expected_clip, lambda y: y),
    "leaky": (lambda m, s: expected_leaky_relu(m, s, 0.1), lambda y: F.leaky_relu(y, 0.1)),
    "prelu": (lambda m, s: expected_leaky_relu(m, s, SLOPES), lambda y: torch.where(y > 0, y, SLOPES.view(-1, 1) * y)),
}


def integral(act, mean, std):
    """E[act(N(mean, std^2))] by the midpoint rule over 12 standard deviations each way, each mean a row."""
    steps = 400_000
    z = torch.tensor((np.arange(steps) + 0.5) / steps * 24 - 12)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (24 / steps)
    return (act(mean.view(-1, 1) + std * z) * density).sum(1)


@pytest.mark.parametrize("std", STDS)
@pytest.mark.parametrize("name", CASES)
def test_as_numerical_integration(name, std):
    expected, act = CASES[name]
    assert torch.allclose(expected(MEANS, std.expand_as(MEANS)), integral(act, MEANS, std), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_as_monte_carlo(name):
    expected, act = CASES[name]
    y = MEANS.view(-1, 1) + 1.5 * torch.randn(len(MEANS), 200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # No activation here spreads values further than 1.5 times: five standard errors.
    error = 5 * 1.5 * 1.5 / math.sqrt(200_000)
    assert torch.allclose(expected(MEANS, torch.full_like(MEANS, 1.5)), act(y).mean(1), rtol=0, atol=error)


@pytest.mark.parametrize("name", CASES)
def test_without_spread_the_mean_is_the_activation_of_the_mean(name):
    expected, act = CASES[name]
    want = act(MEANS.view(-1, 1))[:, 0]
    assert torch.allclose(expected(MEANS, torch.zeros_like(MEANS)), want, rtol=0, atol=1e-15)


def test_half_a_normal_has_the_mean_of_its_density_at_0():
    zero = torch.zeros(1)
    assert float(expected_relu(zero, zero + 2)) == pytest.approx(2 / math.sqrt(2 * math.pi), rel=1e-15)
    assert expected_relu(zero, zero + 2).dtype == torch.float64


def test_far_below_0_the_mean_is_0_and_never_negative():
    means = torch.linspace(-60, -5, 500)
    got = expected_relu(means, torch.ones_like(means))
    assert torch.all((got >= 0) & (got < 1e-7))
