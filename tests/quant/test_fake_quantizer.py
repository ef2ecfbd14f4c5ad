import pytest
import torch
from torch.testing import assert_close

from qat.errors import QATError
from qat.quant import RANGES, FakeQuantizer, QuantSpec
from qat.quant.affine import fake_quantize, qparams

WEIGHT, ACTIVATION = QuantSpec(4), QuantSpec(4, False, False)
ALL = [*RANGES, "lsq"]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(quantizer):
    return {k: v.clone() if isinstance(v, torch.Tensor) else dict(v) for k, v in quantizer.state_dict().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)


@pytest.mark.parametrize("name", list(RANGES))
@pytest.mark.parametrize("spec", [WEIGHT, ACTIVATION])
def test_range_of_the_tensor_at_hand(name, spec):
    quantizer = FakeQuantizer(spec, name, running=False)
    for seed in range(2):
        w = normal(6, 10, seed=seed)
        expected = qparams(*RANGES[name](w, spec, 0), spec)
        assert torch.equal(quantizer(w), fake_quantize(w, *expected, spec))
        assert torch.equal(quantizer.scale, expected[0]) and torch.equal(quantizer.zero_point, expected[1])
    quantizer.eval()
    before, other = state(quantizer), normal(6, 10, seed=9) * 3
    assert torch.equal(quantizer(other), fake_quantize(other, *qparams(*RANGES[name](other, spec, 0), spec), spec))
    assert same(before, state(quantizer))


@pytest.mark.parametrize("spec", [ACTIVATION, QuantSpec(4), QuantSpec(4, False)])
def test_running_minmax_keeps_the_extremes(spec):
    quantizer = FakeQuantizer(spec, "minmax", running=True, axis=1)
    batches = [normal(5, 3, seed=i) * (3 - i) + 2 * i for i in range(3)]
    for batch in batches:
        quantizer(batch)
    joint = torch.cat(batches)
    expected = qparams(*RANGES["minmax"](joint, spec, 1), spec)
    assert torch.equal(quantizer.scale, expected[0]) and torch.equal(quantizer.zero_point, expected[1])


@pytest.mark.parametrize("momentum", [0.01, 0.4, 1.0])
def test_running_average_starts_without_bias(momentum):
    quantizer = FakeQuantizer(ACTIVATION, "ema", momentum=momentum).double()
    lo = hi = None
    for n in range(1, 7):
        batch = normal(40, seed=n).double() + n
        weight = max(momentum, 1 / n)
        lo = batch.min() if lo is None else (1 - weight) * lo + weight * batch.min()
        hi = batch.max() if hi is None else (1 - weight) * hi + weight * batch.max()
        quantizer(batch)
        scale, zero_point = qparams(lo, hi, ACTIVATION)
        assert_close(quantizer.scale, scale, rtol=1e-12, atol=0)
        assert torch.equal(quantizer.zero_point, zero_point)


@pytest.mark.parametrize("name", ["percentile", "mse"])
def test_other_running_ranges_are_averaged(name):
    quantizer = FakeQuantizer(ACTIVATION, name, running=True)
    batches = [normal(60, seed=i) * (i + 1) for i in range(3)]
    for batch in batches:
        quantizer(batch)
    ends = [torch.stack(RANGES[name](batch, ACTIVATION, 0)) for batch in batches]
    lo, hi = torch.stack(ends).mean(0)
    assert_close(quantizer.scale, qparams(lo, hi, ACTIVATION)[0])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("spec", [ACTIVATION, WEIGHT])
def test_eval_and_frozen_never_move_state(name, running, spec):
    quantizer = FakeQuantizer(spec, name, running=running)
    quantizer(normal(4, 30))
    for stop in (quantizer.eval, quantizer.freeze, quantizer.train):  # train() must not unfreeze
        stop()
        before = state(quantizer)
        quantizer(normal(4, 30, seed=5) * 10)
        assert same(before, state(quantizer))
        quantizer.qparams_for(normal(4, 30, seed=6)), quantizer.codes(normal(4, 30, seed=6))
        assert same(before, state(quantizer))
    quantizer.unfreeze()
    if name != "lsq":
        before = state(quantizer)
        quantizer(normal(4, 30, seed=7) * 10)
        assert not same(before, state(quantizer))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("spec", [ACTIVATION, WEIGHT, QuantSpec(4, False)])
def test_qparams_and_codes_tell_what_forward_does(name, running, spec):
    quantizer = FakeQuantizer(spec, name, running=running)
    for mode in ("fresh", "train", "eval", "frozen"):
        if mode == "eval":
            quantizer.eval()
        if mode == "frozen":
            quantizer.freeze()
        x = normal(4, 30, seed=len(mode)) * 2
        before = state(quantizer)
        scale, zero_point = quantizer.qparams_for(x)
        codes = quantizer.codes(x)
        assert same(before, state(quantizer))
        assert zero_point.dtype == codes.dtype == torch.int32
        shape = (-1, 1) if spec.per_channel else ()
        out = quantizer(x).detach()
        assert torch.equal(out, (codes - zero_point.view(shape)) * scale.view(shape)), mode
        assert codes.min() >= spec.qmin and codes.max() <= spec.qmax


def test_running_quantizer_that_has_seen_nothing_passes_through():
    for name in ("ema", "minmax", "lsq"):
        quantizer = FakeQuantizer(ACTIVATION, name, running=True).eval()
        quantizer.name = "quantizers.stem"
        x = normal(10)
        assert torch.equal(quantizer(x), x) and not quantizer.initialized
        with pytest.raises(QATError, match=r"quantizers\.stem.*calibrate"):
            quantizer.codes(x)
        quantizer.train()
        assert not torch.equal(quantizer(x), x) and quantizer.initialized


def test_disabled_still_observes():
    quantizer = FakeQuantizer(ACTIVATION, "ema")
    quantizer.enabled = False
    x = normal(30)
    assert quantizer(x) is x
    assert torch.equal(quantizer.scale, qparams(x.min(), x.max(), ACTIVATION)[0])
    quantizer.enabled = True
    assert not torch.equal(quantizer(x), x)
    weights = FakeQuantizer(WEIGHT)
    weights.enabled = False
    assert weights(x) is x


@pytest.mark.parametrize("name", ["ema", "minmax", "percentile", "mse"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("spec", [ACTIVATION, WEIGHT])
def test_nonfinite_batch_is_ignored_and_counted(name, bad, spec):
    quantizer, clean = (FakeQuantizer(spec, name, running=True) for _ in range(2))
    poisoned = normal(4, 30, seed=8)
    poisoned[2, 3] = bad
    assert not quantizer(poisoned)[:2].isnan().any()
    assert not quantizer.initialized and int(quantizer.nonfinite_batches) == 1
    for seed in range(3):
        quantizer(normal(4, 30, seed=seed)), clean(normal(4, 30, seed=seed))
        quantizer(poisoned)
    assert int(quantizer.nonfinite_batches) == 4 and int(clean.nonfinite_batches) == 0
    assert torch.equal(quantizer.scale, clean.scale) and torch.equal(quantizer.zero_point, clean.zero_point)


def test_nonfinite_tensor_does_not_start_a_learned_scale():
    quantizer = FakeQuantizer(ACTIVATION, "lsq", running=True)
    quantizer(torch.tensor([1.0, float("nan")]))
    assert not quantizer.initialized and int(quantizer.nonfinite_batches) == 1 and torch.isfinite(quantizer.scale)
    quantizer(normal(30))
    assert quantizer.initialized


def test_nonfinite_weight_keeps_a_finite_scale_and_is_counted():
    quantizer = FakeQuantizer(WEIGHT)
    w = normal(3, 5)
    w[1, 1] = float("inf")
    quantizer(w)
    assert torch.isfinite(quantizer.scale).all() and int(quantizer.nonfinite_batches) == 1


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("spec", [ACTIVATION, WEIGHT, QuantSpec(8, False)])
def test_zero_filters_and_constants(name, spec):
    for running in (True, False):
        quantizer = FakeQuantizer(spec, name, running=running)
        w = normal(3, 8)
        w[1] = 0
        out = quantizer(w.requires_grad_())
        out.square().sum().backward()
        assert torch.equal(out[1], torch.zeros(8)) and torch.isfinite(w.grad).all()
        assert (quantizer.scale > 0).all() and torch.isfinite(quantizer.scale).all()
        for value in (0.0, 7.0, -7.0):
            constant = torch.full((3, 8), value)
            quantizer = FakeQuantizer(spec, name, running=running)
            out = quantizer(constant)
            scale, zero_point = quantizer.qparams_for(constant)
            assert torch.isfinite(out).all() and (scale > 0).all()
            assert (zero_point >= spec.qmin).all() and (zero_point <= spec.qmax).all()
            if name != "lsq":
                assert_close(out, constant)


def test_range_that_does_not_contain_zero():
    quantizer = FakeQuantizer(ACTIVATION, "ema")
    quantizer(normal(50).abs() + 3)
    assert int(quantizer.zero_point) == 0
    assert torch.equal(quantizer.eval()(torch.zeros(2)), torch.zeros(2))


def test_straight_through_gradient():
    quantizer = FakeQuantizer(ACTIVATION, "ema")
    quantizer(torch.linspace(-1, 1, 50))
    quantizer.freeze()
    x = torch.tensor([-5.0, -0.5, 0.5, 5.0], requires_grad=True)
    quantizer(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0]


def test_per_channel_weights_scale_with_their_filter():
    """Q(c W) = c Q(W) for per-channel symmetric min-max: what keeps a folded weight free of batch jitter."""
    w, c = normal(5, 20).double(), normal(5, 1, seed=1).double()
    quantizer = FakeQuantizer(QuantSpec(4))
    assert_close(quantizer(c * w), c * quantizer(w), rtol=1e-12, atol=1e-12)


def test_freeze_from_a_tensor():
    quantizer = FakeQuantizer(WEIGHT)
    with pytest.raises(QATError, match="freeze"):
        quantizer.freeze()
    w = normal(4, 9)
    quantizer.freeze(w)
    assert torch.equal(quantizer.scale, qparams(*RANGES["minmax"](w, WEIGHT, 0), WEIGHT)[0])
    assert torch.equal(quantizer(w * 2), fake_quantize(w * 2, quantizer.scale, quantizer.zero_point, WEIGHT))
    held = quantizer.scale.clone()
    quantizer.freeze(w * 2)
    assert torch.equal(quantizer.scale, held), "a range that is held is not taken again"
    quantizer.unfreeze()
    quantizer.freeze(w * 2)
    assert torch.equal(quantizer.scale, held * 2)


def test_initialize_sets_the_state_of_every_kind():
    for name in ALL:
        for running in (True, False):
            quantizer = FakeQuantizer(WEIGHT, name, running=running).eval()
            quantizer.initialize(normal(6, 20))
            assert quantizer.initialized and quantizer.scale.shape == (6,) and (quantizer.scale != 1).all()


def test_empty_batch_changes_nothing():
    quantizer = FakeQuantizer(ACTIVATION, "ema")
    assert quantizer(torch.zeros(0, 3)).shape == (0, 3) and not quantizer.initialized


def test_wrong_number_of_channels_is_named():
    quantizer = FakeQuantizer(WEIGHT)
    quantizer.name = "stem.conv.weight_quantizer"
    quantizer(normal(4, 3))
    for mode in (quantizer.train, quantizer.eval, quantizer.freeze):
        mode()
        with pytest.raises(QATError, match=r"stem\.conv.*5 channels.*expected 4"):
            quantizer(normal(5, 3))


@pytest.mark.parametrize("arguments", [{"range": "median"}, {"momentum": 0}, {"momentum": 1.5}])
def test_wrong_arguments(arguments):
    with pytest.raises(QATError):
        FakeQuantizer(WEIGHT, **arguments)
