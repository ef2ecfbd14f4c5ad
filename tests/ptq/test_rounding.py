"""The equations of AdaRound against numpy, at their ends, and on any weights."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounding_reference import beta_at, f, h, soft

import qat
from qat.ptq.rounding import (
    annealed,
    both_roundings,
    check_grid,
    hard_codes,
    rectified_sigmoid,
    rectified_sigmoid_gradient,
    regulariser,
    regulariser_gradient,
    start,
)
from qat.quant.affine import quantize

V = torch.linspace(-6, 6, 241, dtype=torch.float64)
SPECS = [qat.QuantSpec(bits=4), qat.QuantSpec(bits=2), qat.QuantSpec(bits=3, narrow=False), qat.QuantSpec(bits=8, per_channel=False)]


def weights(spec, seed=0, size=(5, 3, 2)):
    """Weights that reach beyond the grid, and their scale."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(size, generator=generator, dtype=torch.float64)
    shape = size[:1] if spec.per_channel else ()
    return w, (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5) * 1.5 / spec.qmax


def rows(scale):
    return scale.view(-1, 1, 1) if scale.dim() else scale


def test_rectified_sigmoid():
    np.testing.assert_allclose(rectified_sigmoid(V).numpy(), h(V.numpy()), atol=1e-14)
    # sigmoid(V) = 11/12 gives 1.2 * 11/12 - 0.1 = 1, and 1/12 gives 0: at V = +-log 11.
    ends = torch.tensor([-np.log(11.0) - 1e-9, 0.0, np.log(11.0) + 1e-9, -50.0, 50.0], dtype=torch.float64)
    assert rectified_sigmoid(ends).tolist() == [0.0, pytest.approx(0.5, abs=1e-15), 1.0, 0.0, 1.0]


@pytest.mark.parametrize("beta", [2.0, 3.5, 20.0])
def test_regulariser_and_its_gradients(beta):
    v = V.clone().requires_grad_()
    assert float(regulariser(rectified_sigmoid(V), beta)) == pytest.approx(f(V.numpy(), beta), rel=1e-13)
    regulariser(rectified_sigmoid(v), beta).backward()
    chain = regulariser_gradient(rectified_sigmoid(V), beta) * rectified_sigmoid_gradient(V)
    torch.testing.assert_close(chain, v.grad, atol=1e-12, rtol=1e-12)
    step = 1e-6
    numeric = [(f(np.array([x + step]), beta) - f(np.array([x - step]), beta)) / (2 * step) for x in V.tolist()]
    away = (V.abs() - np.log(11.0)).abs() > 1e-3  # where the derivative jumps
    np.testing.assert_allclose(chain[away].numpy(), np.array(numeric)[away.numpy()], atol=1e-6)


def test_regulariser_is_zero_only_where_all_is_decided():
    decided = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    assert float(regulariser(decided, 2.0)) == 0.0
    assert float(regulariser(torch.tensor([0.5, 0.0]), 2.0)) == 1.0
    assert float(regulariser(torch.tensor([0.25]), 2.0)) == 0.75


def test_beta_is_annealed_by_half_a_cosine_after_the_warm_up():
    values = [annealed(step, 11, 0.2, (20.0, 2.0)) for step in range(11)]
    assert values[:3] == [None, None, None] and values[10] == pytest.approx(2.0)
    assert values[3:] == pytest.approx([beta_at(step, 11, 0.2, 20.0, 2.0) for step in range(3, 11)])
    without = [annealed(step, 5, 0.0, (20.0, 2.0)) for step in range(5)]
    assert without == pytest.approx([20.0, 20 - 9 * (1 - 2**-0.5), 11.0, 2 + 9 * (1 - 2**-0.5), 2.0])
    assert annealed(0, 1, 0.0, (20.0, 2.0)) == 20.0


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_soft_weights_are_those_of_the_paper(spec):
    w, scale = weights(spec)
    lower, up = both_roundings(w, scale, spec)
    generator = torch.Generator().manual_seed(1)
    v = torch.randn(w.shape, generator=generator, dtype=torch.float64) * 3
    got = rows(scale) * (lower + up * rectified_sigmoid(v))
    np.testing.assert_allclose(got.numpy(), soft(w.numpy(), rows(scale).numpy(), v.numpy(), spec.qmin, spec.qmax), atol=1e-14)
    assert set(up.unique().tolist()) == {0.0, 1.0}, "some weights should lie beyond the grid"
    from_start = rows(scale) * (lower + up * rectified_sigmoid(start(w, scale)))
    inside = (w >= rows(scale) * spec.qmin) & (w <= rows(scale) * spec.qmax)
    torch.testing.assert_close(from_start[inside], w[inside], atol=1e-12, rtol=0)
    assert torch.equal(from_start[~inside], (rows(scale) * lower)[~inside])


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_start_rounded_hard_is_the_nearest_rounding(spec):
    w, scale = weights(spec, seed=2, size=(20, 5, 4))
    lower, up = both_roundings(w, scale, spec)
    assert torch.equal(hard_codes(lower, up, rectified_sigmoid(start(w, scale))), quantize(w, scale, torch.tensor(0), spec))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_on_the_grid_have_one_rounding(dtype):
    """Also where the last bits of a product and a quotient put them beside it."""
    spec = qat.QuantSpec(bits=8)
    codes = torch.arange(-127, 128).repeat(50, 1)
    scale = (torch.rand(50, generator=torch.Generator().manual_seed(0)) * 3 + 1e-3).to(dtype)
    factor = torch.rand(50, generator=torch.Generator().manual_seed(1)).to(dtype).view(-1, 1) + 0.1
    written = (codes * scale.view(-1, 1)) / factor * factor
    if dtype == torch.float32:
        assert not torch.equal(written / scale.view(-1, 1), codes.to(dtype)), "the case should not be exact"
    lower, up = both_roundings(written, scale, spec)
    assert torch.equal(lower, codes.to(dtype)) and not up.any()
    # A thousandth of a step beside the grid there are two again.
    beside = written + scale.view(-1, 1) * 1e-3
    lower, up = both_roundings(beside, scale, spec)
    assert torch.equal(lower, codes.to(dtype)) and torch.equal(up, (codes < 127).to(dtype))


def test_filters_of_zeros_stay_zero():
    spec, w = qat.QuantSpec(bits=4), torch.zeros(2, 3)
    lower, up = both_roundings(w, torch.full((2,), 2.0**-14), spec)
    assert not lower.any() and not up.any() and torch.isfinite(start(w, torch.ones(2))).all()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12),
    st.floats(0.0009765625, 50, width=32),
    st.sampled_from(SPECS),
    st.integers(0, 2**31),
)
def test_whatever_v_is_the_codes_are_a_rounding_within_the_grid(values, scale, spec, seed):
    w, scale = torch.tensor([values]), torch.tensor([scale] if spec.per_channel else scale)
    lower, up = both_roundings(w, scale, spec)
    v = torch.randn(w.shape, generator=torch.Generator().manual_seed(seed)) * 10
    codes = hard_codes(lower, up, rectified_sigmoid(v))
    assert codes.dtype == torch.int32
    check_grid("layer", codes, w, scale, spec)
    steps = (w / scale).numpy().astype(np.float64)
    assert int(codes.min()) >= spec.qmin and int(codes.max()) <= spec.qmax
    distance = np.abs(codes.numpy() - np.clip(steps, spec.qmin, spec.qmax))
    assert (distance <= 1 + 1e-4).all() and (distance[np.abs(steps - np.rint(steps)) < 1e-7] <= 1e-7).all()


def test_the_grid_check_names_the_layer_and_the_weight():
    spec, w, scale = qat.QuantSpec(bits=4), torch.tensor([[0.4, -1.2], [9.5, 2.0]]), torch.ones(2)
    for fine in ([[0, -1], [7, 2]], [[1, -2], [7, 2]]):
        check_grid("stem.conv", torch.tensor(fine, dtype=torch.int32), w, scale, spec)
    for wrong, said in [
        ([[0, -1], [7, 3]], r"stem.conv: found 1 codes .* the first 3 at \(1, 1\); expected 2 or 2 there"),
        ([[2, 0], [7, 2]], r"stem.conv: found 2 codes .* the first 2 at \(0, 0\); expected 0 or 1 there"),
        ([[0, -1], [8, 2]], r"the first 8 at \(1, 0\); expected 7 or 7 there"),
    ]:
        with pytest.raises(qat.QATError, match=said):
            check_grid("stem.conv", torch.tensor(wrong, dtype=torch.int32), w, scale, spec)
