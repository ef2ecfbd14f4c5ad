"""Freezing, checkpoints, copies, pooling, drift and odd surroundings of a folded layer."""

import copy
import io
import pickle

import pytest
import torch
from fold_cases import BATCH_STRATEGIES, assert_close, batch, pair, quantizer
from fold_reference import Quant
from torch import nn

from qat.errors import QATError
from qat.fold import STRATEGIES
from qat.fold.statistics import batch_statistics
from qat.quant import FakeQuantizer, QuantSpec

KIND = "transposed2d_grouped"


def layer_of(strategy, range="minmax", kind=KIND, bits=4, per_channel=True):
    return STRATEGIES[strategy](*pair(kind, bias=True, gamma="negative"), FakeQuantizer(QuantSpec(bits, per_channel=per_channel), range))


@pytest.mark.parametrize("range", ["minmax", "mse", "percentile", "lsq"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_training_is_eval_bit_for_bit(strategy, range):
    layer = layer_of(strategy, range)
    layer(batch(KIND, 0))
    layer.freeze()
    before = {key: value.clone() for key, value in layer.state_dict().items() if "running" in key or "tracked" in key}
    trained = layer.train()(batch(KIND, 1))
    assert layer.frozen == layer.train().frozen
    assert all(torch.equal(layer.state_dict()[key], value) for key, value in before.items())
    assert torch.equal(trained, layer.eval()(batch(KIND, 1)))
    assert torch.equal(trained, layer.inference_forward(batch(KIND, 1)))


@pytest.mark.parametrize("range", ["minmax", "lsq"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saved_and_loaded_it_goes_on_the_same(strategy, range):
    layer = layer_of(strategy, range)
    layer(batch(KIND, 0))
    layer.freeze()
    layer.freeze_ranges()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = STRATEGIES[strategy](*pair(KIND, bias=True, seed=5), FakeQuantizer(QuantSpec(4), range))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    copies = [fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        assert other.frozen and not other.weight_quantizer.observing
        assert torch.equal(other.train()(batch(KIND, 1)), layer.train()(batch(KIND, 1)))
        assert other.frozen
        for key, value in layer.state_dict().items():
            assert other.state_dict()[key] == value if isinstance(value, dict) else torch.equal(other.state_dict()[key], value)


def test_the_frozen_strategy_never_thaws():
    layer = layer_of("frozen")
    layer.unfreeze()
    layer.load_state_dict(layer_of("naive").state_dict())
    assert layer.frozen and torch.equal(layer(batch(KIND, 0)), layer.eval()(batch(KIND, 0)))


@pytest.mark.parametrize("strategy", BATCH_STRATEGIES)
def test_eval_moves_nothing(strategy):
    layer = layer_of(strategy).eval()
    before = copy.deepcopy(layer.state_dict())
    layer(batch(KIND, 0))
    for key, value in before.items():
        assert layer.state_dict()[key] == value if isinstance(value, dict) else torch.equal(layer.state_dict()[key], value)
    assert layer.drift() is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", [*BATCH_STRATEGIES, "frozen"])
def test_pooling_gives_the_statistics_of_all_batches_together(strategy, frozen):
    layer = layer_of(strategy)
    if frozen:
        layer.freeze()
    seen = []
    kept, state = layer.statistics, layer.bn.running_mean.clone()
    layer.start_pooling()
    for seed in range(3):
        x = batch(KIND, seed)[: seed + 1]
        seen.append(kept(x))
        layer(x)
        assert torch.equal(layer.bn.running_mean, state)
    layer.finish_pooling()
    n = sum(count for _, _, count in seen)
    mean = sum(m * c for m, _, c in seen) / n
    var = sum(c * (v + (m - mean) ** 2) for m, v, c in seen) / n
    assert_close(layer.bn.running_mean, mean.detach(), "mean")
    assert_close(layer.bn.running_var, (var * n / (n - 1)).detach(), "variance")
    tracked = int(layer.bn.num_batches_tracked)
    layer(batch(KIND, 5))
    assert int(layer.bn.num_batches_tracked) == tracked + (not layer.frozen)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pooling_over_no_batch_changes_nothing(strategy):
    layer = layer_of(strategy)
    before = copy.deepcopy(layer.state_dict())
    layer.start_pooling()
    layer.eval()(batch(KIND, 0))
    layer.finish_pooling()
    assert all(torch.equal(layer.state_dict()[k], v) for k, v in before.items() if isinstance(v, torch.Tensor))


def test_drift_measures_the_last_batch_against_the_running_statistics():
    conv, bn = pair("linear", momentum=0.0)
    layer = STRATEGIES["bn_correction"](conv, bn)
    assert layer.drift() is None
    x = batch("linear", 0)
    layer(x)
    mean, var, _ = batch_statistics(conv(x))
    by_mean, by_sigma = layer.drift()
    sigma = (bn.running_var + bn.eps).sqrt()
    assert_close(by_mean, ((mean - bn.running_mean).abs() / sigma).detach(), "mean")
    assert_close(by_sigma, ((var + bn.eps).sqrt() / sigma).log().abs().detach(), "sigma")
    assert not layer.batch_mean.requires_grad and "batch_mean" not in layer.state_dict()


@pytest.mark.parametrize("strategy", [name for name in BATCH_STRATEGIES])
def test_a_batch_of_one_names_the_layer(strategy):
    layer = STRATEGIES[strategy](*pair("linear"), quantizer(Quant(8, True)))
    layer.name = "head.fc"
    with pytest.raises(QATError, match=r"head\.fc: .*more than 1 value per channel"):
        layer(torch.zeros(1, 5, dtype=torch.float64))
    layer.freeze()
    assert layer(torch.zeros(1, 5, dtype=torch.float64)).shape == (1, 4)


def test_an_input_of_another_rank_is_refused():
    layer = STRATEGIES["naive"](*pair("linear"))
    for mode in (True, False):
        with pytest.raises(QATError, match="rank 3"):
            layer.train(mode)(torch.zeros(4, 4, 5, dtype=torch.float64))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["conv2d_grouped", "timm_same", "linear"])
def test_autocast_keeps_folds_and_statistics_wide(strategy, kind):
    conv, bn = (m.float() for m in pair(kind, bias=True))
    layer = STRATEGIES[strategy](conv, bn, quantizer(Quant(8, True)))
    wide = copy.deepcopy(layer)
    x = batch(kind, 0).detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        assert all(t.dtype == torch.float32 for t in layer.folded())
    y.float().sum().backward()
    assert (y.float() - wide(x)).abs().max() < 0.15
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())
    assert layer.weight_quantizer.scale.dtype == torch.float32
    if layer.bn is not None:
        assert layer.bn.running_mean.dtype == torch.float32
        assert_close(layer.bn.running_mean, wide.bn.running_mean, "running mean", 0.03)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bfloat16_layer_runs(strategy):
    conv, bn = (m.bfloat16() for m in pair("conv2d_grouped", bias=True))
    layer = STRATEGIES[strategy](conv, bn, quantizer(Quant(8, True)))
    x = batch("conv2d_grouped", 0).detach().bfloat16()
    assert layer(x).dtype == layer.eval()(x).dtype == torch.bfloat16


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calibration_under_inference_mode_does_not_break_training(strategy):
    layer = layer_of(strategy, "lsq")
    with torch.inference_mode():
        layer(batch(KIND, 0))
    layer(batch(KIND, 1)).square().sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()
    assert bool(layer(batch(KIND, 1)).isfinite().all())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_parameter_gets_a_gradient(strategy):
    layer = layer_of(strategy, "lsq")
    layer(batch(KIND, 0)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in layer.parameters())


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_ranges_are_those_of_inference_and_rest(strategy, per_channel):
    if strategy == "scale_merge" and not per_channel:
        return
    layer = layer_of(strategy, per_channel=per_channel)
    before = layer.eval().integer()
    layer.train().freeze_ranges()
    scale = layer.weight_quantizer.scale.clone()
    for a, b in zip(layer.integer(), before):
        assert torch.equal(a, b)
    with torch.no_grad():
        next(layer.parameters()).mul_(1.3)
    layer(batch(KIND, 0))
    assert torch.equal(layer.weight_quantizer.scale, scale)
    layer.unfreeze_ranges()
    layer(batch(KIND, 0))
    assert not torch.equal(layer.weight_quantizer.scale, scale)


def test_a_fresh_learned_scale_quantizes_before_the_first_step():
    layer = layer_of("bn_correction", "lsq", per_channel=False).eval()
    assert layer.integer()[0].abs().max() <= 7
    assert not torch.allclose(layer.quantized()[0], layer.folded()[0])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_integers_need_a_live_symmetric_quantizer(strategy):
    plain = STRATEGIES[strategy](*pair(KIND))
    with pytest.raises(QATError, match="no weight quantizer"):
        plain.integer()
    layer = layer_of(strategy)
    layer.weight_quantizer.enabled = False
    with pytest.raises(QATError, match="switched off"):
        layer.integer()
    asymmetric = STRATEGIES[strategy](*pair(KIND), FakeQuantizer(QuantSpec(8, symmetric=False)))
    with pytest.raises(QATError, match="asymmetric"):
        asymmetric.integer()


@pytest.mark.parametrize("range", ["minmax", "lsq"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_compiles_without_a_graph_break(strategy, range):
    torch._dynamo.reset()
    layer = layer_of(strategy, range)
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for freeze in (False, True):
        for seed in (0, 1):
            assert_close(compiled(batch(KIND, seed)), plain(batch(KIND, seed)), f"frozen={freeze} {seed}")
        layer.freeze(), plain.freeze()


@pytest.mark.parametrize("strategy", BATCH_STRATEGIES)
def test_training_forward_never_waits_for_the_device(strategy):
    """Reading a number back to Python needs `aten::_local_scalar_dense`, on every device."""
    layer = layer_of(strategy, bits=8)
    layer.bn.momentum = None
    x = batch(KIND, 0)
    layer(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x).sum().backward()
    assert "aten::_local_scalar_dense" not in {event.key for event in profile.key_averages()}


def test_static_keeps_who_trains():
    conv, bn = pair(KIND)
    conv.weight.requires_grad_(False)
    layer = STRATEGIES["static"](conv, bn)
    assert not layer.weight_fold.requires_grad and layer.bias_fold.requires_grad


def test_layers_are_found_as_modules():
    layer = layer_of("bn_correction")
    assert isinstance(layer.activation, nn.Identity) and layer.name == "" and "strategy=bn_correction" in repr(layer)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_its_compiled_gradients_are_the_eager_ones(strategy, frozen):
    """The statistics move in the forward pass: a backward pass that computed from them once more would take the new ones."""
    torch._dynamo.reset()
    layer = layer_of(strategy, kind="conv2d_grouped")
    layer.train()
    if frozen:
        layer.freeze()
    plain = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for network, own in ((compiled, layer), (plain, plain)):
        x = (5 + 3 * batch("conv2d_grouped", 0)).detach().requires_grad_()
        y = network(x)
        (y**3).sum().backward()
        found.append([y, x.grad, *(p.grad for p in own.parameters())])
    for index, (got, wanted) in enumerate(zip(*found)):
        assert_close(got, wanted, f"{index}", 1e-9)
