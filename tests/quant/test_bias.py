"""Biases of 32 bits: where they do not fit, and the scale at which they do."""

import pytest
import torch

from qat.quant import QuantSpec
from qat.quant.bias import LARGEST_CODE, bias_codes, leave_room, too_large

X_SCALE = torch.tensor(0.01)
BIAS = torch.tensor([1.0, -50.0, 0.0])
CODES = torch.tensor([[100, -3], [127, 1], [5, 5]])


def test_one_scale_a_channel_rises_where_it_must():
    scale = torch.tensor([1e-3, 1e-9, 1e-3])
    assert too_large(BIAS, scale * X_SCALE).tolist() == [False, True, False]
    codes, raised = leave_room(CODES, scale, BIAS, X_SCALE, QuantSpec())
    needed = 50.0 / (0.01 * LARGEST_CODE)
    assert raised.tolist() == pytest.approx([1e-3, needed, 1e-3], rel=1e-5) and float(raised[1]) >= needed
    assert codes.tolist() == [[100, -3], [round(127 * 1e-9 / needed), 0], [5, 5]]
    assert bias_codes(BIAS, raised * X_SCALE).abs().max() <= LARGEST_CODE
    assert not too_large(BIAS, raised * X_SCALE).any()


def test_one_scale_for_all_rises_for_all():
    codes, raised = leave_room(CODES, torch.tensor(1e-6), BIAS, X_SCALE, QuantSpec(per_channel=False))
    factor = 50.0 / (0.01 * LARGEST_CODE) / 1e-6
    assert raised.ndim == 0 and float(raised) == pytest.approx(1e-6 * factor, rel=1e-5)
    assert codes.tolist() == [[round(c / factor) for c in row] for row in CODES.tolist()]


def test_powers_of_two_stay_powers_of_two():
    scale = torch.tensor([2.0**-10, 2.0**-30, 2.0**-10])
    _, raised = leave_room(CODES, scale, BIAS, X_SCALE, QuantSpec(power_of_two=True))
    assert raised.tolist() == [2.0**-10, 2.0**-17, 2.0**-10]
