"""The BatchNorm merged into scales: what is refused, signs, zeros."""

import pytest
import torch
from fold_cases import assert_close, batch, pair

from qat.errors import QATError
from qat.fold import STRATEGIES
from qat.fold.scale_merge import merged
from qat.quant import FakeQuantizer, QuantSpec


def layer_of(spec, gamma="plain"):
    return STRATEGIES["scale_merge"](*pair("conv2d_grouped", gamma=gamma), FakeQuantizer(spec))


def test_by_hand():
    codes, scale = torch.tensor([[3, -7], [5, -2], [4, 1]], dtype=torch.int32), torch.tensor([0.5, 0.25, 2.0])
    new_codes, new_scale = merged(codes, scale, torch.tensor([2.0, -4.0, 0.0]))
    assert new_codes.dtype == torch.int32
    assert new_codes.tolist() == [[3, -7], [-5, 2], [0, 0]]
    assert new_scale.tolist() == [1.0, 1.0, 2.0]


def test_a_per_tensor_scale_is_refused():
    with pytest.raises(QATError, match=r"scale_merge of Conv2d: found a per-tensor weight quantizer.*per_channel=True"):
        layer_of(QuantSpec(8, per_channel=False))
    named = FakeQuantizer(QuantSpec(8, per_channel=False))
    named.name = "stem.conv"
    with pytest.raises(QATError, match=r"stem\.conv"):
        STRATEGIES["scale_merge"](*pair("conv2d_grouped"), named)


def test_a_negative_gamma_needs_a_narrow_grid():
    with pytest.raises(QATError, match="negative gamma"):
        layer_of(QuantSpec(8, narrow=False), "negative")
    layer = layer_of(QuantSpec(8, narrow=False))
    assert layer.integer()[0].dtype == torch.int32
    layer.name = "block.conv"
    with torch.no_grad():
        layer.bn.weight[3] = -0.5
    with pytest.raises(QATError, match=r"block\.conv: found 1 channels with a negative gamma"):
        layer.integer()


def test_integers_of_a_negative_row_are_the_mirrored_ones():
    plain, negative = layer_of(QuantSpec(4)).eval(), layer_of(QuantSpec(4), "negative").eval()
    signs = negative.bn.weight.sign().view(-1, 1, 1, 1)
    assert torch.equal(negative.integer()[0], plain.integer()[0] * signs.int())
    assert torch.equal(negative.integer()[1], plain.integer()[1])


def test_the_scales_of_the_weights_do_not_know_gamma():
    layer, other = layer_of(QuantSpec(4)), layer_of(QuantSpec(4), "negative")
    layer(batch("conv2d_grouped", 0)), other(batch("conv2d_grouped", 0))
    assert torch.equal(layer.weight_quantizer.scale, other.weight_quantizer.scale)
    weight, _ = layer.eval().quantized()
    factor = (layer.bn.weight / (layer.bn.running_var + layer.bn.eps).sqrt()).view(-1, 1, 1, 1)
    assert_close(weight, layer.weight_quantizer(layer.conv.weight) * factor, "weight")
