"""Changing the strategy keeps the inference function, over all pairs, kinds of scale and states."""

from itertools import product

import pytest
import torch
from fold_cases import assert_close, batch, pair

from qat.errors import QATError
from qat.fold import STRATEGIES
from qat.fold.refold import refold
from qat.quant import FakeQuantizer, QuantSpec

LIVE = [name for name in STRATEGIES if name != "static"]
KIND = "transposed2d_grouped"


def trained(strategy, range, per_channel=True, held=False, gamma="negative", quantized=True, narrow=True):
    spec = QuantSpec(4, per_channel=per_channel, narrow=narrow)
    layer = STRATEGIES[strategy](*pair(KIND, bias=True, gamma=gamma), FakeQuantizer(spec, range) if quantized else None)
    for seed in (0, 1):
        layer(batch(KIND, seed)).square().mean().backward()
    if held:
        layer.freeze_ranges()
    if range == "lsq":
        with torch.no_grad():
            layer.weight_quantizer.scale.mul_(0.8)
    return layer


def same_function(layer, other, what):
    layer.eval()
    expected = layer(batch(KIND, 5))
    changed = refold(layer, other)
    assert changed.strategy == other and not changed.training
    assert_close(changed(batch(KIND, 5)), expected, what)
    for a, b in zip(changed.folded(), layer.folded()):
        assert_close(a, b, f"{what} folded")
    if layer.weight_quantizer is not None:
        codes, _, _ = layer.integer()
        assert torch.equal(changed.integer()[0], codes), what
    assert torch.equal(layer(batch(KIND, 5)), expected)
    return changed


@pytest.mark.parametrize("one", LIVE)
def test_all_pairs(one):
    for other in STRATEGIES:
        for range, held in product(("minmax", "mse", "lsq"), (False, True)):
            same_function(trained(one, range, held=held), other, f"{one} to {other} {range} held={held}")
        same_function(trained(one, "minmax", quantized=False), other, f"{one} to {other}")
        if "scale_merge" not in (one, other):
            same_function(trained(one, "lsq", per_channel=False), other, f"{one} to {other} per tensor")


@pytest.mark.parametrize("range, held", [("minmax", True), ("lsq", False), ("ema", False)])
def test_to_scale_merge_and_back_with_a_dead_channel(range, held):
    layer = trained("bn_correction", range, held=held, gamma="one_zero")
    there = same_function(layer, "scale_merge", f"{range} there")
    assert bool((there.weight_quantizer.scale > 0).all())
    back = same_function(there, "bn_correction", f"{range} back")
    live = layer.gamma != 0
    assert_close(back.weight_quantizer.scale[live], layer.weight_quantizer.scale[live], "scale")
    # The channel comes alive in the merged layer: its scale fits its weights.
    with torch.no_grad():
        there.bn.weight[1] = 1.0
    assert there.integer()[0][1].abs().max() > 0


def test_state_travels():
    layer = trained("bn_correction", "minmax")
    layer.name = "block.conv"
    layer.freeze()
    changed = refold(layer, "naive")
    assert changed.frozen and changed.name == "block.conv" and changed.training
    assert changed.conv is layer.conv and changed.bn is layer.bn and changed.weight_quantizer is layer.weight_quantizer
    assert refold(changed, "frozen").frozen
    assert not refold(refold(trained("naive", "minmax"), "frozen"), "naive").frozen
    assert refold(layer, "batch_renorm", r_max=2.0).r_max == 2.0


def test_what_cannot_be():
    static = refold(trained("naive", "minmax"), "static")
    assert refold(static, "static") is static
    with pytest.raises(QATError, match="a layer that still has its BatchNorm"):
        refold(static, "naive")
    with pytest.raises(QATError, match="per-tensor"):
        refold(trained("naive", "minmax", per_channel=False), "scale_merge")
    with pytest.raises(QATError, match="negative gamma"):
        refold(trained("naive", "minmax", narrow=False), "scale_merge")
    merged = trained("scale_merge", "minmax", narrow=False, gamma="plain")
    with torch.no_grad():
        merged.bn.weight[0] = -1
    with pytest.raises(QATError, match="negative gamma"):
        refold(merged, "naive")
    with pytest.raises(QATError, match="bn_correction"):
        refold(merged, "nave")
