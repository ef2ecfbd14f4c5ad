from math import sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qat.quant import FakeQuantizer, QuantSpec
from qat.quant.affine import MIN_SCALE, fake_quantize
from qat.quant.learned import effective, learned_fake_quantize

SPECS = [QuantSpec(bits, symmetric, per_channel) for bits in (2, 4, 8) for symmetric in (True, False) for per_channel in (True, False)]
quick = settings(deadline=None, max_examples=40, derandomize=True)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(x, upstream, s, z, spec, factor):
    """(d/dx, d/ds, d/dz) of one scale, element by element from the published formula."""
    dx, ds, dz = torch.zeros_like(x), 0.0, 0.0
    for i in range(x.numel()):
        ratio, g = float(x.view(-1)[i]) / s, float(upstream.view(-1)[i])
        code = round(ratio) + z  # Python rounds half to even
        if code < spec.qmin:
            ds, dz = ds + g * (spec.qmin - z), dz - g * s
        elif code > spec.qmax:
            ds, dz = ds + g * (spec.qmax - z), dz - g * s
        else:
            ds = ds + g * (round(ratio) - ratio)
            dx.view(-1)[i] = g
    return dx, factor * ds, factor * dz


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("spread", [0.3, 1.0, 6.0])
def test_gradients_follow_the_formula(spec, spread):
    x, upstream = normal(3, 4, 5, seed=1) * spread, normal(3, 4, 5, seed=2)
    scale = torch.tensor([0.5, 0.3, 0.7], dtype=torch.float64) if spec.per_channel else torch.tensor(0.4, dtype=torch.float64)
    zero = torch.zeros_like(scale) if spec.symmetric else torch.ones_like(scale) * 0.4 * spec.qmax + 0.1
    x.requires_grad_(), scale.requires_grad_(), zero.requires_grad_(not spec.symmetric)
    learned_fake_quantize(x, scale, zero, spec, 0, 0.25).backward(upstream)
    s, z = effective(scale.detach(), zero.detach(), spec)
    for row in range(3) if spec.per_channel else [slice(None)]:
        at = row if spec.per_channel else ()
        dx, ds, dz = gradients(x.detach()[row].contiguous(), upstream[row].contiguous(), float(s[at]), int(z[at]), spec, 0.25)
        assert_close(x.grad[row], dx, rtol=0, atol=0)
        assert float(scale.grad[at]) == pytest.approx(ds, rel=1e-10, abs=1e-12)
        if not spec.symmetric:
            assert float(zero.grad[at]) == pytest.approx(dz, rel=1e-10, abs=1e-12)


@given(st.sampled_from(SPECS), st.floats(1e-3, 1e2), st.integers(0, 100))
@quick
def test_value_is_that_of_the_plain_quantizer(spec, size, seed):
    x = normal(3, 20, seed=seed).float()
    scale = torch.tensor([size, size / 2, size * 3]) if spec.per_channel else torch.tensor(size)
    zero = torch.zeros_like(scale, dtype=torch.int32) if spec.symmetric else torch.full_like(scale, spec.qmax / 3)
    expected = fake_quantize(x, *effective(scale, zero, spec), spec)
    assert torch.equal(learned_fake_quantize(x, scale, zero, spec, 0, 1.0), expected)


@pytest.mark.parametrize("spec", [QuantSpec(4, per_channel=False), QuantSpec(4, False, False)])
def test_same_gradients_as_torch_per_tensor(spec):
    x, upstream = (normal(200, seed=3) * 2).float(), normal(200, seed=4).float()
    grads = []
    for theirs in (True, False):
        leaf = x.clone().requires_grad_()
        scale, zero = torch.tensor([0.3], requires_grad=True), torch.tensor([0.0 if spec.symmetric else 6.0], requires_grad=True)
        if theirs:
            out = torch._fake_quantize_learnable_per_tensor_affine(leaf, scale, zero, spec.qmin, spec.qmax, 0.5)
        else:
            out = learned_fake_quantize(leaf, scale.squeeze(), zero.squeeze(), spec, 0, 0.5)
        out.backward(upstream)
        grads.append((out.detach(), leaf.grad, scale.grad, zero.grad))
    for a, b in zip(*grads):
        assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_scale_gradient_is_the_derivative_of_the_clipped_part():
    """Outside the range x_hat = s qmax exactly, so that the formula is an ordinary derivative there."""
    spec = QuantSpec(4, per_channel=False)
    x = torch.full((6,), 100.0, dtype=torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros((), dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda s: learned_fake_quantize(x, s, zero, spec, 0, 1.0), scale)


@pytest.mark.parametrize("start", [-0.3, 0.0, 1e-20])
def test_scale_stays_positive_and_recovers(start):
    spec = QuantSpec(4, per_channel=False)
    scale = torch.tensor(start, requires_grad=True)
    zero = torch.zeros((), dtype=torch.int32)
    s, _ = effective(scale.detach(), zero, spec)
    assert float(s) == pytest.approx(max(abs(start), MIN_SCALE))
    # All elements lie above the range, where a larger scale, of either sign, would raise the output.
    learned_fake_quantize(torch.full((3,), 10.0), scale, zero, spec, 0, 1.0).sum().backward()
    assert float(scale.grad) == (-21 if start < 0 else 21)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_initial_scale(per_channel, bits):
    w = normal(4, 3, 3, 3)
    quantizer = FakeQuantizer(QuantSpec(bits, per_channel=per_channel), "lsq")
    quantizer.initialize(w)
    mean = w.abs().mean((1, 2, 3)) if per_channel else w.abs().mean()
    assert_close(quantizer.scale.detach(), 2 * mean / sqrt(2 ** (bits - 1) - 1))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shift", [-3.0, -0.5, 0.0, 0.5, 3.0])
def test_initial_asymmetric_range_covers_both_signs(bits, shift):
    spec = QuantSpec(bits, False, False)
    x = normal(500) + shift
    quantizer = FakeQuantizer(spec, "lsq", running=True)
    quantizer.initialize(x)
    scale, zero_point = quantizer.qparams_for(x)
    assert_close(scale, 2 * x.abs().mean() / sqrt(spec.qmax))
    lowest, highest = -scale * int(zero_point), scale * (spec.qmax - int(zero_point))
    if x.min() < 0:
        assert lowest < 0
    if scale * spec.qmax > (x.max() - x.min()) + scale:
        assert lowest <= x.min() and highest >= x.max()
    if x.min() >= 0:
        assert int(zero_point) == 0


@pytest.mark.parametrize("running, elements", [(False, 4 * 3 * 5), (True, 3 * 5)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_gradient_scale_counts_elements_that_share_a_scale(running, elements, per_channel):
    """A batch does not count: with running=True axis 0 is one."""
    spec = QuantSpec(4, per_channel=per_channel)
    x = normal(4, 3, 5)
    quantizer = FakeQuantizer(spec, "lsq", axis=1, running=running).double()
    quantizer.initialize(x)
    quantizer(x).sum().backward()
    raw = quantizer.scale.detach().clone().requires_grad_()
    learned_fake_quantize(x, raw, quantizer.zero_point, spec, 1, 1.0).sum().backward()
    assert_close(quantizer.scale.grad, raw.grad / sqrt(elements / (3 if per_channel else 1) * spec.qmax))


@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(4, False)])
def test_parameters_have_their_shape_before_the_optimizer_is_made(spec):
    quantizer = FakeQuantizer(spec, "lsq")
    quantizer.size_for(6)
    assert all(p.shape == (6,) for p in quantizer.parameters())
    assert len(list(quantizer.parameters())) == (1 if spec.symmetric else 2)
    held = list(quantizer.parameters())
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.1, momentum=0.9)
    quantizer(normal(6, 20).float()).square().sum().backward()
    before = quantizer.scale.detach().clone()
    optimizer.step()
    assert not torch.equal(before, quantizer.scale)
    assert all(a is b for a, b in zip(held, quantizer.parameters()))


def test_learning_lowers_the_error():
    w = normal(4, 64).float()
    quantizer = FakeQuantizer(QuantSpec(3), "lsq")
    quantizer.initialize(w)
    with torch.no_grad():
        quantizer.scale.mul_(3)
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.05)
    errors = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (quantizer(w) - w).square().sum()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()))
    assert errors[-1] < 0.5 * errors[0]


def test_frozen_scale_gets_no_gradient():
    quantizer = FakeQuantizer(QuantSpec(4), "lsq")
    w = normal(4, 8).float().requires_grad_()
    live = quantizer(w)
    quantizer.freeze()
    held = quantizer(w)
    assert torch.equal(live, held)
    held.sum().backward()
    assert quantizer.scale.grad is None and w.grad is not None


def test_delayed_start_follows_the_tensor_until_training_with_it_begins():
    quantizer = FakeQuantizer(QuantSpec(4, per_channel=False), "lsq")
    quantizer.enabled = False
    w = normal(50).float()
    for factor in (1.0, 5.0):
        assert torch.equal(quantizer(w * factor), w * factor)
    followed = quantizer.scale.detach().clone()
    assert_close(followed, 2 * (5 * w).abs().mean() / sqrt(7))
    quantizer.enabled = True
    quantizer(w)
    quantizer.enabled = False
    quantizer(w * 100)
    assert torch.equal(quantizer.scale.detach(), followed)
