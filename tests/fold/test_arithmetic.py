"""Closed forms and properties of the folding arithmetic."""

import pytest
import torch
from fold_cases import assert_close, pair
from fold_kinds import KINDS
from torch import nn

from qat.fold.arithmetic import fold_bias, fold_weight, native, out_first, scale_shift, sigma


def test_transposed_layout_by_hand():
    conv = nn.ConvTranspose1d(4, 6, 1, groups=2)
    weight = torch.arange(12.0).view(4, 3, 1)
    # Group 0 reads channels 0, 1 and writes 0, 1, 2; group 1 reads 2, 3 and writes 3, 4, 5.
    expected = torch.tensor([[0.0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]).unsqueeze(-1)
    assert torch.equal(out_first(weight, conv), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_are_inverse_and_rows_are_output_channels(kind):
    conv, bn = pair(kind)
    rows = out_first(conv.weight, conv)
    assert torch.equal(native(rows, conv), conv.weight)
    assert rows.shape[0] == bn.num_features
    x = torch.ones(KINDS[kind].shape, dtype=torch.float64)
    factor = torch.linspace(-1, 2, bn.num_features, dtype=torch.float64)
    scaled = native(rows * factor.view(-1, *[1] * (rows.dim() - 1)), conv)
    y = KINDS[kind].apply(x, conv.weight)
    assert_close(KINDS[kind].apply(x, scaled), y * factor.view(1, -1, *[1] * (y.dim() - 2)), kind)


def test_fold_closed_form():
    var, gamma, beta, mean = torch.tensor([3.0]), torch.tensor([4.0]), torch.tensor([0.5]), torch.tensor([2.0])
    s = sigma(var, 1.0)
    assert s.item() == 2.0
    assert fold_weight(torch.tensor([[3.0, -1.0]]), gamma, s).tolist() == [[6.0, -2.0]]
    assert fold_bias(None, gamma, beta, mean, s).item() == -3.5
    assert fold_bias(torch.tensor([1.0]), gamma, beta, mean, s).item() == -1.5


def test_fold_gradients():
    torch.manual_seed(0)
    weight, gamma, beta, mean, bias = (torch.randn(3, *rest, dtype=torch.float64, requires_grad=True) for rest in ((2, 2), (), (), (), ()))
    var = torch.rand(3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, g, v: fold_weight(w, g, sigma(v, 1e-3)), (weight, gamma, var))
    assert torch.autograd.gradcheck(lambda b, g, t, m, v: fold_bias(b, g, t, m, sigma(v, 1e-3)), (bias, gamma, beta, mean, var))


@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 4), (2, 3, 2, 2), (2, 3, 2, 2, 2)])
def test_scale_shift(shape):
    torch.manual_seed(0)
    u = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    scale, shift = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    view = (1, 3, *[1] * (len(shape) - 2))
    assert_close(scale_shift(u, scale, shift), u * scale.view(view) + shift.view(view), "value")
    assert torch.autograd.gradcheck(scale_shift, (u, scale, shift))


def test_half_types_are_folded_in_float32():
    half = torch.rand(3).half() + 0.1
    s = sigma(half, 1e-5)
    assert s.dtype == fold_weight(half.view(3, 1), half, s).dtype == fold_bias(half, half, half, half, s).dtype == torch.float32
    assert scale_shift(torch.ones(2, 3, 4).bfloat16(), torch.ones(3), torch.ones(3)).dtype == torch.bfloat16


def test_variance_of_almost_nothing_stays_finite():
    for var in (0.0, 1e-14):
        s = sigma(torch.full((2,), var), 1e-5)
        weight = fold_weight(torch.randn(2, 3), torch.ones(2), s)
        assert bool(weight.isfinite().all()) and bool(s.gt(0).all())
