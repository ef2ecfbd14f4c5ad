import numpy as np
import pytest
import quant_reference as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from qat.quant import QuantSpec
from qat.quant.affine import EMPTY_SCALE, dequantize, fake_quantize, qparams, quantize

SPECS = st.builds(QuantSpec, st.integers(2, 8), st.booleans(), st.booleans(), st.booleans())
ENDS = st.floats(-1e4, 1e4, width=32)
quick = settings(deadline=None, max_examples=80, derandomize=True)


@st.composite
def cases(draw):
    """(x of shape (3, 40), scale, zero_point, spec, lo, hi) with x reaching beyond the range."""
    spec = draw(SPECS)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    channels = 3 if spec.per_channel else 1
    ends = torch.tensor(draw(st.lists(st.tuples(ENDS, ENDS), min_size=channels, max_size=channels)), dtype=dtype)
    lo, hi = ends.amin(1), ends.amax(1)
    x = torch.linspace(-0.2, 1.2, 40, dtype=dtype)
    x = lo[:, None] + (hi - lo)[:, None] * x
    x = x.expand(3, 40)
    if not spec.per_channel:
        lo, hi = lo[0], hi[0]
    return x.contiguous(), *qparams(lo, hi, spec), spec, lo, hi


@given(cases())
@quick
def test_scale_is_positive_and_zero_point_in_range(case):
    x, scale, zero_point, spec, _, _ = case
    assert scale.dtype == x.dtype and zero_point.dtype == torch.int32
    assert (scale > 0).all() and torch.isfinite(scale).all()
    assert (zero_point >= spec.qmin).all() and (zero_point <= spec.qmax).all()


@given(cases())
@quick
def test_codes_are_on_the_grid_and_stand_for_the_fake_quantized_values(case):
    x, scale, zero_point, spec, _, _ = case
    codes = quantize(x, scale, zero_point, spec)
    assert codes.dtype == torch.int32 and codes.min() >= spec.qmin and codes.max() <= spec.qmax
    assert torch.equal(dequantize(codes, scale, zero_point), fake_quantize(x, scale, zero_point, spec))


@given(cases())
@quick
def test_grid_points_are_fixed_points(case):
    _, scale, zero_point, spec, _, _ = case
    codes = torch.arange(spec.qmin, spec.qmax + 1, dtype=torch.int32).expand(3, -1)
    points = dequantize(codes, scale, zero_point)
    assert torch.equal(quantize(points, scale, zero_point, spec), codes)
    assert torch.equal(fake_quantize(points, scale, zero_point, spec), points)


@given(cases())
@quick
def test_monotone(case):
    x, scale, zero_point, spec, _, _ = case
    assert (fake_quantize(x.sort(1).values, scale, zero_point, spec).diff(dim=1) >= 0).all()


@given(cases())
@quick
def test_error_is_at_most_half_a_step_inside_the_range(case):
    x, scale, zero_point, spec, lo, hi = case
    column = [-1, 1] if spec.per_channel else [1, 1]
    lo, hi, step = lo.clamp(max=0).view(column), hi.clamp(min=0).view(column), scale.view(column)
    error = (fake_quantize(x, scale, zero_point, spec) - x).abs()
    # A product and a quotient of float32, each off by half a unit in the last place of up to 255 steps.
    bound = step * (0.5 + 256 * 3 * torch.finfo(x.dtype).eps)
    assert torch.where((x >= lo) & (x <= hi), error <= bound, True).all()


@given(cases())
@quick
def test_zero_is_exact(case):
    _, scale, zero_point, spec, _, _ = case
    zeros = torch.zeros(3, 2, dtype=scale.dtype)
    assert torch.equal(fake_quantize(zeros, scale, zero_point, spec), zeros)
    expected = zero_point.view(-1, 1) if spec.per_channel else zero_point
    assert (quantize(zeros, scale, zero_point, spec) == expected).all()


@given(cases())
@quick
def test_straight_through_gradient(case):
    x, scale, zero_point, spec, _, _ = case
    x = x.clone().requires_grad_()
    out = fake_quantize(x, scale, zero_point, spec)
    upstream = torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)
    out.backward(upstream)
    column = [-1, 1] if spec.per_channel else []
    steps = (x.detach() * scale.reciprocal().view(column)).round() + zero_point.view(column)
    assert torch.equal(x.grad, upstream * ((steps >= spec.qmin) & (steps <= spec.qmax)))
    assert torch.equal(out.detach(), fake_quantize(x.detach(), scale, zero_point, spec))


@given(cases())
@quick
def test_against_numpy(case):
    x, _, _, spec, lo, hi = case
    x, lo, hi = x.double(), lo.double(), hi.double()
    scale, zero_point = qparams(lo, hi, spec)
    out = fake_quantize(x, scale, zero_point, spec)
    flags = (spec.bits, spec.symmetric, spec.narrow)
    for row in range(3):
        end = (lo[row], hi[row]) if spec.per_channel else (lo, hi)
        if max(abs(float(e)) for e in end) < 1e-3:
            continue  # the floor of the scale is a choice of its own, tested below
        s, z = reference.qparams(*end, *flags)
        at = row if spec.per_channel else ()
        assert float(scale[at]) == pytest.approx(s, rel=1e-14) and int(zero_point[at]) == z
        away_from_ties = np.abs(np.abs(x[row].numpy() / s % 1) - 0.5) > 1e-9
        expected = reference.fake_quantize(x[row].numpy(), s, z, *flags)
        np.testing.assert_allclose(out[row].numpy()[away_from_ties], expected[away_from_ties], rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(8, False), QuantSpec(4, per_channel=False), QuantSpec(3, False, False)])
def test_same_numbers_as_torch_operators_but_at_ties(spec):
    steps = torch.arange(-300, 300) / 2  # every second one a tie
    scale = torch.tensor([0.5, 0.1, 0.013]) if spec.per_channel else torch.tensor(0.1)
    zero_point = torch.zeros_like(scale, dtype=torch.int32) + (0 if spec.symmetric else 3)
    x = (steps * scale.view(-1, 1)).expand(3, -1).clone().requires_grad_()
    y = x.detach().clone().requires_grad_()
    out = fake_quantize(x, scale, zero_point, spec)
    if spec.per_channel:
        theirs = torch.fake_quantize_per_channel_affine(y, scale, zero_point, 0, spec.qmin, spec.qmax)
    else:
        theirs = torch.fake_quantize_per_tensor_affine(y, scale, zero_point, spec.qmin, spec.qmax)
    # They multiply by the reciprocal of the scale: at a tie that may give the code next door, nowhere else.
    tie = (steps % 1 != 0).expand(3, -1)
    assert torch.equal(out[~tie], theirs[~tie])
    assert ((out - theirs).abs() <= scale.view(-1, 1) * 1.0001).all()
    out.sum().backward()
    theirs.sum().backward()
    assert torch.equal(x.grad[~tie], y.grad[~tie])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("spec", [QuantSpec(4), QuantSpec(8, False), QuantSpec(4, per_channel=False), QuantSpec(3, False, False)])
def test_cuda_gives_the_same_numbers(spec):
    x = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    scale, zero_point = qparams(x.amin(1), x.amax(1), spec) if spec.per_channel else qparams(x.min(), x.max(), spec)
    on_device = fake_quantize(x.cuda(), scale.cuda(), zero_point.cuda(), spec)
    assert torch.equal(on_device.cpu(), fake_quantize(x, scale, zero_point, spec))


def test_rounds_half_to_even():
    spec = QuantSpec(8, per_channel=False)
    x = torch.tensor([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5])
    codes = quantize(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), spec)
    assert codes.tolist() == [-2, -2, 0, 0, 2, 2]


def test_closed_form():
    scale, zero_point = qparams(torch.tensor(-1.0), torch.tensor(3.0), QuantSpec(2, False, False))
    assert (float(scale), int(zero_point)) == (pytest.approx(4 / 3), 1)
    scale, zero_point = qparams(torch.tensor(-127.0), torch.tensor(3.0), QuantSpec(8))
    assert (float(scale), int(zero_point)) == (1.0, 0)
    scale, _ = qparams(torch.tensor(-128.0), torch.tensor(127.0), QuantSpec(8, narrow=False))
    assert float(scale) == 1.0


def test_axis_other_than_the_first():
    spec = QuantSpec(4)
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    scale, zero_point = torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.int32)
    moved = fake_quantize(x.movedim(1, 0), scale, zero_point, spec)
    for axis in (1, -2):
        assert torch.equal(fake_quantize(x, scale, zero_point, spec, axis=axis).movedim(1, 0), moved)
        assert torch.equal(dequantize(quantize(x, scale, zero_point, spec, axis), scale, zero_point, axis).movedim(1, 0), moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype):
    spec = QuantSpec(8, False, False)
    x = torch.randn(50, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    scale, zero_point = qparams(x.detach().min(), x.detach().max(), spec)
    assert scale.dtype == torch.float32
    out = fake_quantize(x, scale, zero_point, spec)
    assert out.dtype == dtype
    assert torch.equal(out, fake_quantize(x.detach().float(), scale, zero_point, spec).to(dtype))
    out.sum().backward()
    assert_close(x.grad, torch.ones_like(x))
    assert torch.equal(quantize(x.detach(), scale, zero_point, spec), quantize(x.detach().float(), scale, zero_point, spec))


@pytest.mark.parametrize("spec", [QuantSpec(8), QuantSpec(8, False), QuantSpec(2, narrow=False)])
@pytest.mark.parametrize(
    "ends",
    [(0.0, 0.0), (1e-40, 1e-40), (5.0, 5.0), (-5.0, -5.0), (2.0, 3.0), (-3e38, 3e38), (-torch.inf, torch.inf), (torch.nan, 1.0)],
)
def test_odd_ranges_give_usable_parameters(spec, ends):
    lo, hi = torch.tensor([ends[0]]), torch.tensor([ends[1]])
    scale, zero_point = qparams(lo, hi, spec)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    assert spec.qmin <= int(zero_point) <= spec.qmax
    zeros = torch.zeros(1, 3)
    assert torch.equal(fake_quantize(zeros, scale, zero_point, spec), zeros)
    if ends[0] == ends[1]:
        value = torch.full((1, 3), ends[0])
        assert ((fake_quantize(value, scale, zero_point, spec) - value).abs() <= scale / 2).all()


def test_an_empty_range_keeps_a_bias_representable():
    scale, _ = qparams(torch.zeros(2), torch.zeros(2), QuantSpec())
    assert torch.equal(scale, torch.full((2,), EMPTY_SCALE))


@pytest.mark.parametrize(
    ("spec", "steps", "inside"),
    [
        (QuantSpec(8, symmetric=False, per_channel=False), [-0.5, -0.50001, 255.5, 255.49], [1, 0, 0, 1]),
        (QuantSpec(8, narrow=False, per_channel=False), [-128.5, -128.51, 127.5, 127.49], [1, 0, 0, 1]),
        (QuantSpec(8, per_channel=False), [-127.5, -127.49, 127.5, 127.49], [0, 1, 0, 1]),
        (QuantSpec(3, narrow=False, per_channel=False), [-4.5, -4.51, 3.5, 3.49], [1, 0, 0, 1]),
    ],
)
def test_the_gradient_at_the_ends_follows_the_rounding(spec, steps, inside):
    x = (torch.tensor(steps) * 0.25).requires_grad_()
    zero = torch.zeros((), dtype=torch.int32)
    fake_quantize(x, torch.tensor(0.25), zero, spec).sum().backward()
    assert x.grad.tolist() == inside
