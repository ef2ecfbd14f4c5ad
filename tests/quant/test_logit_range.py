"""The range of logits: least cross entropy between the shares of the classes before and after quantization [WP21 eq. 17]."""

import pytest
import quant_reference as reference
import torch
from torch import nn

import qat
from qat.quant import FakeQuantizer, QuantSpec
from qat.quant.affine import fake_quantize, qparams
from qat.quant.ranges import cross_entropy, minmax, mse

SPECS = [QuantSpec(bits, symmetric, False, narrow=False) for bits in (2, 3, 4, 8) for symmetric in (True, False)]
LOGITS = QuantSpec(4, False, False)


def logits(*shape, seed=0, dtype=torch.float64):
    """Most of them small, one in ten well above the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=dtype) - 3
    return x + 9 * (torch.rand(shape, generator=generator, dtype=dtype) > 0.9)


def entropy(x, lo, hi, spec):
    return float(-(x.softmax(1) * fake_quantize(x, *qparams(lo, hi, spec), spec).log_softmax(1)).sum())


@pytest.mark.parametrize("shape", [(24, 10), (4, 5, 3, 2)])
@pytest.mark.parametrize("spec", SPECS)
def test_finds_the_least_cross_entropy(spec, shape):
    x = logits(*shape)
    lo, hi = cross_entropy(x, spec)
    assert lo.shape == hi.shape == ()
    best_lo, best_hi, error = reference.cross_entropy(x.numpy(), spec.bits, spec.symmetric, spec.narrow)
    # Compared by error: two ranges may be equally good up to rounding.
    assert error(float(lo), float(hi)) == pytest.approx(error(best_lo, best_hi), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.symmetric])
def test_no_other_range_among_the_candidates_has_less(spec, seed):
    """On a symmetric grid mse looks at the same candidates."""
    x = logits(24, 10, seed=seed)
    least = entropy(x, *cross_entropy(x, spec), spec)
    assert least <= entropy(x, *minmax(x, spec, 0), spec)
    assert least <= entropy(x, *mse(x, spec, 0), spec) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [2, 4])
def test_asymmetric_ends_have_no_more_than_the_full_range(bits, seed):
    x, spec = logits(24, 10, seed=seed), QuantSpec(bits, False, False)
    assert entropy(x, *cross_entropy(x, spec), spec) <= entropy(x, *minmax(x, spec, 0), spec)


def test_small_logits_of_no_class_get_no_part_of_the_grid():
    """The many logits near -30 decide nothing; a squared error keeps them on the grid and gives the two large ones one code."""
    x = torch.full((8, 50), -30.0, dtype=torch.float64)
    x[:, 0], x[:, 1] = 5.0, 4.0
    spec = QuantSpec(3, False, False)
    least = float(-(x.softmax(1) * x.log_softmax(1)).sum())  # a cross entropy with the shares themselves
    excess = {search: entropy(x, *search(x, spec, 0), spec) - least for search in (cross_entropy, mse)}
    codes = fake_quantize(x, *qparams(*mse(x, spec, 0), spec), spec)
    assert torch.equal(codes[:, 0], codes[:, 1])
    assert 0 < excess[cross_entropy] < 0.2 * excess[mse]


def test_one_class_has_the_full_range():
    x = logits(20, 1)
    assert [float(end) for end in cross_entropy(x, LOGITS)] == [min(float(x.min()), 0), max(float(x.max()), 0)]


def test_large_tensors_are_sampled_by_whole_pictures():
    x = logits(5000, 10, dtype=torch.float32)
    assert entropy(x, *cross_entropy(x, LOGITS), LOGITS) == pytest.approx(entropy(x, *cross_entropy(x[::3], LOGITS), LOGITS), rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_batch_that_is_not_finite_is_ignored_and_counted(bad):
    quantizer, clean = (FakeQuantizer(LOGITS, "cross_entropy") for _ in range(2))
    poisoned = logits(6, 5, seed=9)
    poisoned[2, 3] = bad
    quantizer(poisoned)
    assert not quantizer.initialized and int(quantizer.nonfinite_batches) == 1
    for seed in range(3):
        quantizer(logits(6, 5, seed=seed)), clean(logits(6, 5, seed=seed))
        quantizer(poisoned)
    assert torch.equal(quantizer.scale, clean.scale) and torch.equal(quantizer.zero_point, clean.zero_point)


def test_the_range_is_averaged_over_batches():
    quantizer, batches = FakeQuantizer(LOGITS, "cross_entropy"), [logits(6, 5, seed=seed) * (seed + 1) for seed in range(3)]
    for batch in batches:
        quantizer(batch)
    ends = [torch.stack([end.clamp(max=0) if i == 0 else end for i, end in enumerate(cross_entropy(b, LOGITS))]) for b in batches]
    scale, zero_point = qparams(*torch.stack(ends).mean(0), LOGITS)
    assert torch.allclose(quantizer.scale, scale, rtol=1e-12) and torch.equal(quantizer.zero_point, zero_point)
    quantizer.eval()
    moved = quantizer.scale.clone()
    quantizer(batches[0] * 7)
    assert torch.equal(quantizer.scale, moved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_give_float32_ranges(dtype):
    assert {end.dtype for end in cross_entropy(logits(6, 5).to(dtype), LOGITS)} == {torch.float32}


@pytest.mark.parametrize("value", [0.0, 2.0, -2.0])
def test_a_constant_tensor_has_a_finite_range_that_holds_it(value):
    lo, hi = cross_entropy(torch.full((2, 6), value), LOGITS)
    assert (float(lo), float(hi)) == (min(value, 0.0), max(value, 0.0))


def test_refusals_are_one_line():
    with pytest.raises(qat.QATError, match=r"one scale a channel.*QuantSpec\(per_channel=False\)"):
        FakeQuantizer(QuantSpec(), "cross_entropy")
    quantizer = FakeQuantizer(LOGITS, "cross_entropy")
    quantizer.name = "quantizers.fc"
    with pytest.raises(qat.QATError, match=r"^quantizers.fc: found a tensor of shape \(8,\).*logits \(N, classes, \*\)"):
        quantizer(torch.zeros(8))
    for wrong in (
        {"weight_range": "cross_entropy"},
        {"activation_range": "cross_entropy"},
        {"overrides": {"fc": {"weight": {"range": "cross_entropy"}}}},
    ):
        with pytest.raises(qat.ConfigError, match=r"^[^\n]*'cross_entropy'; expected[^\n]*logits[^\n]*$"):
            qat.QATConfig(**wrong)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_the_classifier_alone_takes_it_by_an_override(strategy):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6)).eval()
    nn.init.normal_(network[4].weight, std=2.0)
    x = torch.randn(32, 2, 4, 4)
    config = qat.QATConfig(fold=strategy, overrides={"4": {"activation": {"range": "cross_entropy", "bits": 3}}})
    prepared = qat.prepare(network, (x,), config)
    quantizers = {name: q for name, q in prepared.named_modules() if name.startswith("quantizers.")}
    assert [name for name, q in quantizers.items() if q.range == "cross_entropy"] == [list(quantizers)[-1]]
    qat.set_fake_quant(prepared, weights=False, activations=False)
    qat.calibrate(prepared, [x])
    got, spec = list(quantizers.values())[-1], QuantSpec(3, False, False)
    with torch.no_grad():
        expected = qparams(*cross_entropy(prepared(x), spec), spec)
    assert torch.allclose(got.scale, expected[0]) and torch.equal(got.zero_point, expected[1])
