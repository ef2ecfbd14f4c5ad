"""A layer of any kind is its weights times the inputs they meet."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qat
from qat.ptq.product import NoProductError, Product, a_number_of, outputs_of

sys.path.insert(0, str(Path(__file__).parents[1] / "fold"))
from fold_kinds import KINDS

WIDER = {
    "same": (lambda: nn.Conv2d(3, 4, (3, 5), padding="same", dilation=2), (2, 3, 6, 5)),
    "reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 5)),
    "replicate3d": (lambda: nn.Conv3d(2, 4, 3, padding=1, padding_mode="replicate", groups=2), (2, 2, 4, 3, 5)),
    "transposed_dilated": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, dilation=2, padding=1, groups=2, output_padding=1),
        (2, 4, 3, 4),
    ),
    "depthwise_twice_as_wide": (lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1, groups=3), (2, 3, 7, 6)),
    "linear_over_tokens": (lambda: nn.Linear(3, 4), (2, 5, 7, 3)),
}


def all_positions(product, x):
    return a_number_of(product.positions(x), len(x), product.positions(x), torch.Generator())


def as_rows(y, linear):
    return y.reshape(-1, y.shape[-1]) if linear else y.flatten(2).transpose(1, 2).reshape(-1, y.shape[1])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_fold(kind):
    torch.manual_seed(0)
    known = KINDS[kind]
    conv = known.build(False).double()
    layer = qat.STRATEGIES["static"](conv)
    x = torch.randn(known.shape, dtype=torch.float64)
    product = Product(layer, layer.weight_to_quantize().detach())
    got = outputs_of(product.matrix(layer.weight_to_quantize()) @ product.met(x, all_positions(product, x)))
    expected = as_rows(known.apply(x, conv.weight), product.linear)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", WIDER)
def test_other_paddings_and_shapes(kind):
    torch.manual_seed(0)
    build, shape = WIDER[kind]
    layer = qat.STRATEGIES["static"](build().double())
    x = torch.randn(shape, dtype=torch.float64)
    _, bias = layer.folded()
    product = Product(layer, layer.weight_to_quantize().detach())
    got = outputs_of(product.matrix(layer.weight_to_quantize()) @ product.met(x, all_positions(product, x))) + bias
    torch.testing.assert_close(got, as_rows(layer.eval()(x), product.linear), atol=1e-12, rtol=1e-12)


def test_chosen_positions_and_pictures_of_another_size():
    torch.manual_seed(0)
    layer = qat.STRATEGIES["static"](nn.Conv2d(2, 3, 3, stride=2, padding=1).double())
    product = Product(layer, layer.weight_to_quantize().detach())
    for size in ((5, 6), (8, 3), (5, 6)):
        x = torch.randn(3, 2, *size, dtype=torch.float64)
        positions = product.positions(x)
        assert positions == ((size[0] + 1) // 2) * ((size[1] + 1) // 2)
        chosen = a_number_of(positions, 3, 4, torch.Generator().manual_seed(1))
        got = outputs_of(product.matrix(layer.weight_to_quantize()) @ product.met(x, chosen)).view(3, 4, 3)
        every = F.conv2d(x, layer.weight_fold, None, 2, 1).flatten(2).transpose(1, 2)
        for item in range(3):
            torch.testing.assert_close(got[item], every[item, chosen[item]])


def test_positions_differ_within_a_picture_and_between_pictures():
    chosen = a_number_of(50, 200, 10, torch.Generator().manual_seed(0))
    assert chosen.shape == (200, 10) and all(len(set(row.tolist())) == 10 for row in chosen)
    # Of 200 times 10 draws each of the 50 has 40, give or take some standard deviations of 5.7.
    counts = torch.bincount(chosen.flatten(), minlength=50)
    assert 15 < int(counts.min()) and int(counts.max()) < 65
    assert a_number_of(3, 2, 7, torch.Generator()).tolist() == [[0, 1, 2], [0, 1, 2]]


class Doubled(nn.Conv2d):
    """Linear in weight and input, but no convolution of its input with its weight."""

    def forward(self, x):
        return super().forward(x * 2.5)


class Mixed(nn.Conv2d):
    def forward(self, x):
        return super().forward(x + x.roll(1, 3))


@pytest.mark.parametrize("kind", [Doubled, Mixed])
def test_a_layer_that_does_more_says_so(kind):
    layer = qat.STRATEGIES["static"](kind(2, 3, 3))
    product = Product(layer, layer.weight_to_quantize().detach())
    with pytest.raises(NoProductError, match=f"this {kind.__name__} does more than weigh its inputs"):
        product.positions(torch.randn(1, 2, 5, 5))
    plain = Product(qat.STRATEGIES["static"](nn.Conv2d(2, 3, 3)), torch.zeros(3, 2, 3, 3))
    with pytest.raises(NoProductError, match="rank 3"):
        plain.positions(torch.randn(2, 5, 5))
