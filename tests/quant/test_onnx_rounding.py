"""Ties go where ONNX QuantizeLinear sends them: float32 division, half to even."""

import numpy as np
import torch

from qat.quant import QuantSpec
from qat.quant.affine import fake_quantize


def test_levels_of_a_picture_round_as_a_true_division_does():
    x = torch.arange(-64, 65) / 32
    scale = torch.tensor(float(2 / 255 * 1.4), dtype=torch.float32)
    zero_point = torch.tensor(120, dtype=torch.int32)
    codes = np.clip(np.round(x.numpy() / scale.numpy()) + 120, 0, 255)
    expected = (codes - 120).astype(np.float32) * scale.numpy()
    spec = QuantSpec(symmetric=False, per_channel=False)
    np.testing.assert_array_equal(fake_quantize(x, scale, zero_point, spec).numpy(), expected)
