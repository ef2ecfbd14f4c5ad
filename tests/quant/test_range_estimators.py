import numpy as np
import pytest
import quant_reference as reference
import torch

from qat.quant import RANGES, QuantSpec
from qat.quant.ranges import mse, percentile

CASES = [QuantSpec(bits, symmetric, per_channel) for bits in (2, 4, 8) for symmetric in (True, False) for per_channel in (True, False)]


def rows_of(x, spec):
    return x.flatten(1).numpy() if spec.per_channel else x.reshape(1, -1).numpy()


def heavy(shape, seed=0):
    """Float64 values with outliers on the upper side."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.where(x > 2.5, x * 4, x)


@pytest.mark.parametrize("name", ["minmax", "ema"])
@pytest.mark.parametrize("spec", CASES[:2])
def test_minmax(name, spec):
    x = heavy((4, 3, 5, 5))
    lo, hi = RANGES[name](x, spec, 0)
    rows = rows_of(x, spec)
    np.testing.assert_array_equal(lo.view(-1).numpy(), rows.min(1))
    np.testing.assert_array_equal(hi.view(-1).numpy(), rows.max(1))


@pytest.mark.parametrize("spec", CASES[:2])
def test_percentile(spec):
    x = heavy((2, 12000))
    lo, hi = percentile(x, spec, 0)
    for low, high, row in zip(lo.view(-1), hi.view(-1), rows_of(x, spec)):
        assert (float(low), float(high)) == reference.percentile(row)


def test_percentile_of_few_elements_is_the_extreme():
    x = heavy((5, 9))
    assert all(torch.equal(a, b) for a, b in zip(percentile(x, QuantSpec(), 0), RANGES["minmax"](x, QuantSpec(), 0)))


@pytest.mark.parametrize("spec", CASES)
def test_mse_finds_the_least_error(spec):
    x = heavy((3, 4, 4, 4))
    lo, hi = mse(x, spec, 0)
    for low, high, row in zip(lo.view(-1), hi.view(-1), rows_of(x, spec)):
        best_lo, best_hi, error = reference.mse(row, spec.bits, spec.symmetric, spec.narrow)
        # Compared by error: two ranges may be equally good up to rounding.
        assert error(float(low), float(high)) == pytest.approx(error(best_lo, best_hi), rel=1e-9)
        assert error(float(low), float(high)) <= error(row.min(), row.max())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mse_is_close_to_the_best_pair_of_ends(bits):
    """An outlier on one side: the ends need different ratios. The search of one end at a time loses little to all pairs."""
    x = np.concatenate([np.linspace(-1, 1, 1001), [10.0]])
    lo, hi = mse(torch.tensor(x), QuantSpec(bits, False, False), 0)
    _, _, error = reference.mse(x, bits, False, False)
    ratios = np.arange(1, 41) / 40
    best = min(error(r * x.min(), q * x.max()) for r in ratios for q in ratios)
    together = min(error(r * x.min(), r * x.max()) for r in ratios)
    assert error(float(lo), float(hi)) <= 1.05 * best
    assert error(float(lo), float(hi)) < 0.9 * together or bits == 8


@pytest.mark.parametrize("name", ["percentile", "mse"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_large_tensors_are_sampled_to_nearly_the_same_range(name, per_channel):
    x = torch.randn(4, 8, 128, 128, generator=torch.Generator().manual_seed(3))
    spec = QuantSpec(4, per_channel=per_channel)
    lo, hi = RANGES[name](x, spec, 1)
    expected = {"percentile": 3.72, "mse": 2.6}[name]  # quantile of the normal; optimal 4-bit clipping of the normal
    assert lo.shape == ((8,) if per_channel else ())
    assert torch.all((hi - expected).abs() < 0.6) and torch.all((lo + expected).abs() < 0.6)


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("axis", [1, -2])
def test_axis(name, axis):
    x = heavy((3, 4, 5))
    spec = QuantSpec(3, False)
    for a, b in zip(RANGES[name](x, spec, axis), RANGES[name](x.movedim(1, 0), spec, 0)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(4, False, False)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nonfinite_element_shows_in_the_range(name, spec, bad):
    x = heavy((3, 50))
    x[1, 7] = bad
    lo, hi = RANGES[name](x, spec, 0)
    finite = torch.isfinite(hi - lo)
    assert finite.tolist() == ([True, False, True] if spec.per_channel else False)


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_give_float32_ranges(name, dtype):
    for end in RANGES[name](heavy((3, 50)).to(dtype), QuantSpec(4), 0):
        assert end.dtype == torch.float32


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(4, False, False)])
def test_constant_and_zero_tensors(name, spec):
    for value in (0.0, 2.0, -2.0):
        lo, hi = RANGES[name](torch.full((2, 6), value), spec, 0)
        assert torch.isfinite(hi - lo).all()
        assert torch.all(torch.where(torch.tensor(value < 0), lo, hi) == value)


@pytest.mark.parametrize("name", list(RANGES))
def test_one_element_a_channel(name):
    lo, hi = RANGES[name](torch.tensor([-1.0, 2.0]), QuantSpec(), 0)
    assert lo.shape == hi.shape == (2,)
