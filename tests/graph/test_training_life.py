"""A prepared network in the hands of a training loop: copies, accumulated gradients, half precision, memory formats, compilation."""

import copy
import io
import pickle

import pytest
import torch
from small_networks import Residual, randomize
from torch import nn
from torch.nn.utils import prune

import qat
from qat.fold import FoldedConvBN
from qat.graph.lifecycle import activation_quantizers, folded_layers
from qat.quant import FakeQuantizer

KEEP_BN = [name for name, strategy in qat.STRATEGIES.items() if strategy.keeps_bn]
# With fake quantization off these are conv -> BatchNorm in value, gradient and statistics.
AS_FLOAT = ["naive", "bn_correction", "single_pass", "scale_merge"]


def batch(seed, size=8):
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def float_network():
    torch.manual_seed(0)
    return randomize(Residual()).train()


def prepared(strategy, network=None, **config):
    network = float_network() if network is None else network
    x = batch(0).to(next(network.parameters()).dtype)
    made = qat.prepare(network, (x,), qat.QATConfig(fold=strategy, **config))
    qat.calibrate(made, [x])
    return made.train()


def train(network, steps, forward=None, first=1):
    """The losses of SGD steps with momentum from zero on batches `first`, `first` + 1, ..."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    forward, losses, dtype = network if forward is None else forward, [], next(network.parameters()).dtype
    for seed in range(first, first + steps):
        loss = forward(batch(seed).to(dtype)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys() and all(torch.equal(value, b[key]) for key, value in a.items())


def saved(content):
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "saved whole": lambda network: torch.load(saved(network), weights_only=False),
    "state dict": lambda network: _loaded(prepared(network.strategy), torch.load(saved(network.state_dict()), weights_only=True)),
}


def _loaded(network, state):
    network.load_state_dict(state)
    return network.train()


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_copy_trains_on_the_same(strategy, kind):
    """Before the freeze and after it; frozen statistics and ranges stay so in the copy."""
    network = prepared(strategy)
    for frozen in (False, True):
        train(network, 2)
        if frozen:
            qat.freeze_bn(network), qat.freeze_ranges(network)
        network.strategy = strategy
        other = COPIES[kind](network)
        assert_same_state(network, other)
        assert train(network, 2, first=5) == train(other, 2, first=5)
        assert_same_state(network, other)
        assert [m.frozen for m in other.modules() if isinstance(m, FoldedConvBN)] == [frozen or strategy == "frozen"] * 3 + [frozen]


@pytest.mark.parametrize("strategy", AS_FLOAT)
def test_accumulated_gradients_and_statistics_are_the_float_networks(strategy):
    """Three micro-batches to a step: gradients add up, the statistics move at each, as torch's BatchNorm does it."""
    plain, network = float_network().double(), prepared(strategy, float_network().double())
    qat.set_fake_quant(network, weights=False, activations=False)
    for seed in range(3):
        for model in (plain, network):
            (model(batch(seed).double()).square().mean() / 3).backward()
    grads = {name.replace(".conv.weight", ".weight").replace(".conv.bias", ".bias"): p.grad for name, p in network.named_parameters()}
    for name, p in plain.named_parameters():
        for conv, bn in network.fold_report.folded:
            name = name.replace(f"{bn}.", f"{conv}.bn.") if name.startswith(f"{bn}.") else name
        name = {"fc.weight": "fc.weight_fold", "fc.bias": "fc.bias_fold"}.get(name, name)
        torch.testing.assert_close(grads.pop(name), p.grad, rtol=1e-9, atol=1e-11, msg=name)
    assert not grads
    for conv, bn in network.fold_report.folded:
        ours, theirs = network.get_submodule(conv).bn, plain.get_submodule(bn)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-9, atol=1e-11)
        assert int(ours.num_batches_tracked) == int(theirs.num_batches_tracked) == 3


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_ranges_take_in_every_micro_batch(strategy):
    """The moving average of the input's ends: the n-th batch weighs max(1/n, momentum), whoever steps in between."""
    network = prepared(strategy)
    lo, hi = batch(0).min(), batch(0).max()
    for n, seed in enumerate((3, 4, 5), 2):
        network(batch(seed)).square().mean().backward()
        weight = max(1 / n, 0.01)
        lo, hi = lo + weight * (batch(seed).min() - lo), hi + weight * (batch(seed).max() - hi)
    quantizer = next(iter(activation_quantizers(network).values()))
    torch.testing.assert_close(quantizer.scale, (hi - lo) / 255)
    assert all(int(q.batches) == 4 for q in activation_quantizers(network).values())


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_bfloat16_autocast(strategy):
    """The loss is close to float32's for several steps; parameters, statistics, scales and gradients stay float32."""
    wide, network = prepared(strategy), prepared(strategy)

    def halved(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = network(x)
        assert y.dtype == torch.bfloat16
        return y.float()

    expected, losses = train(wide, 4), train(network, 4, halved)
    assert losses == pytest.approx(expected, rel=0.05) and losses != expected
    for name, value in network.state_dict().items():
        assert value.dtype == wide.state_dict()[name].dtype and value.dtype != torch.bfloat16, name
        assert torch.isfinite(value).all(), name
    for name, layer in folded_layers(network).items():
        if layer.bn is not None and strategy != "frozen":
            other = wide.get_submodule(name).bn
            torch.testing.assert_close(layer.bn.running_var, other.running_var, rtol=0.05, atol=0.01)
    for name, quantizer in activation_quantizers(network).items():
        torch.testing.assert_close(quantizer.scale, activation_quantizers(wide)[name].scale, rtol=0.05, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in network.parameters() if p.grad is not None)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_channels_last(strategy, frozen):
    """The same network as on contiguous pictures, and every picture-like tensor stays channels last, forward and backward."""
    network = prepared(strategy)
    if frozen:
        qat.freeze_bn(network), qat.freeze_ranges(network)
    other = copy.deepcopy(network).to(memory_format=torch.channels_last)
    kept = {}

    def note(name):
        def look(module, inputs, output):
            if output.dim() == 4:
                kept[name] = output.is_contiguous(memory_format=torch.channels_last)
                output.register_hook(lambda g: kept.__setitem__(f"gradient of {name}", g.is_contiguous(memory_format=torch.channels_last)))

        return look

    for name, module in other.named_modules():
        if name in folded_layers(other) or name in activation_quantizers(other):
            module.register_forward_hook(note(name))
    x = batch(1).to(memory_format=torch.channels_last).requires_grad_()
    expected, y = network(batch(1)), other(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for out in (expected, y):
        out.square().mean().backward()
    for (name, p), q in zip(network.named_parameters(), other.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    for (name, p), q in zip(network.named_buffers(), other.buffers()):
        torch.testing.assert_close(q, p, rtol=1e-4, atol=1e-4, msg=name)
    assert len(kept) >= 12 and all(kept.values()), [name for name, is_kept in kept.items() if not is_kept]


class Small(nn.Module):
    """Few layers: compilation takes seconds a layer."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).relu().mean((2, 3)))


def compare_compiled(strategy, frozen, backend, rel=1e-3):
    """One graph, or an error. In float64, where few roundings go the other way; torch's decompositions lose some digits even so."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    network = prepared(strategy, randomize(Small()).train().double())
    if frozen:
        qat.freeze_bn(network), qat.freeze_ranges(network)
    other = copy.deepcopy(network)
    expected = train(network, 3)
    assert train(other, 3, torch.compile(other, backend=backend, fullgraph=True)) == pytest.approx(expected, rel=rel)
    for name, value in network.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=10 * rel, atol=rel, msg=name)


# Layer by layer, for all strategies: tests/fold/test_layer_life.py. After the freeze the forward is that of inference for all of them.
QUICK = [("bn_correction", False), ("bn_correction", True), ("static", False)]
CASES = [(name, frozen) for name in qat.STRATEGIES for frozen in (False, True)]


@pytest.mark.parametrize(("strategy", "frozen"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES])
def test_captured_as_one_graph_it_trains_the_same_bit_by_bit(strategy, frozen):
    compare_compiled(strategy, frozen, "eager", rel=0.0)


def test_its_backward_compiles_too():
    compare_compiled("bn_correction", False, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_compiled_it_trains_the_same(strategy, frozen, backend):
    compare_compiled(strategy, frozen, backend)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_parameters_the_user_froze_stay(strategy):
    network = float_network()
    for part in (network.conv1, network.bn1, network.fc):
        part.requires_grad_(False)
    network = prepared(strategy, network)
    held = {name: p.detach().clone() for name, p in network.named_parameters() if not p.requires_grad}
    folded = ["conv1.weight_fold", "conv1.bias_fold"]
    whole = ["conv1.conv.weight", "conv1.conv.bias", "conv1.bn.weight", "conv1.bn.bias"]
    assert sorted(held) == sorted([*(folded if strategy == "static" else whole), "fc.weight_fold", "fc.bias_fold"])
    moving = {name: p.detach().clone() for name, p in network.named_parameters() if p.requires_grad}
    train(network, 2)
    now = dict(network.named_parameters())
    assert all(torch.equal(now[name], value) and now[name].grad is None for name, value in held.items())
    assert all(not torch.equal(now[name], value) for name, value in moving.items() if "conv2.conv.bias" not in name)


class Flat(nn.Module):
    """Its second BatchNorm sees one value a picture."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.fc(self.bn(self.conv(x)).mean((2, 3))))


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_batch_of_one_ends_as_in_the_float_network(strategy):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        Flat().train()(batch(0, 1))
    network = qat.prepare(Flat().train(), (batch(0),), qat.QATConfig(fold=strategy))
    qat.calibrate(network, [batch(0)])
    if strategy in ("static", "frozen"):
        assert torch.isfinite(network.train()(batch(0, 1))).all()
        return
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(qat.QATError, match=r"^fc: found a layer output of shape \(1, 4\); expected more than 1 value per channel"):
        network.train()(batch(0, 1))
    assert all(torch.equal(network.state_dict()[key], value) for key, value in before.items() if key.startswith("fc."))
    qat.freeze_bn(network)
    assert network(batch(0, 1)).shape == (1, 4)


@pytest.mark.parametrize("strategy", AS_FLOAT)
def test_a_last_partial_batch_moves_the_statistics_as_in_the_float_network(strategy):
    plain, network = float_network().double(), prepared(strategy, float_network().double())
    qat.set_fake_quant(network, weights=False, activations=False)
    for x in (batch(1).double(), batch(2, 3).double()):
        torch.testing.assert_close(network(x), plain(x), rtol=1e-9, atol=1e-11)
    for conv, bn in network.fold_report.folded:
        torch.testing.assert_close(network.get_submodule(conv).bn.running_var, plain.get_submodule(bn).running_var, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_sync_batch_norms_train_on_one_process(strategy):
    """As BatchNorms do."""
    network = prepared(strategy, nn.SyncBatchNorm.convert_sync_batchnorm(float_network()))
    other = prepared(strategy)
    assert network.fold_report.folded == other.fold_report.folded and len(other.fold_report.folded) == 3
    assert train(network, 2) == train(other, 2)
    assert_same_state(network, other)


def test_an_uncalibrated_quantizer_is_told_apart_from_a_calibrated_one():
    """What a compiled forward branches on is known without reading the device."""
    network = qat.prepare(float_network(), (batch(0),), qat.QATConfig())
    assert not any(m._ready for m in network.modules() if isinstance(m, FakeQuantizer) and m.running)
    qat.calibrate(network, [batch(0)])
    assert all(m._ready for m in network.modules() if isinstance(m, FakeQuantizer))


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_forward_in_evaluation_before_one_in_training_and_one_backward(strategy):
    """Ranges and statistics that the second moves are not those of the first's gradient."""
    network = qat.prepare(randomize(Residual()), (batch(0),), qat.QATConfig(fold=strategy))
    qat.calibrate(network, [batch(0)])
    alone = copy.deepcopy(network).eval()
    alone(batch(1)).square().sum().backward()
    both, second = copy.deepcopy(network), copy.deepcopy(network).train()
    second(batch(2)).square().sum().backward()
    loss = both.eval()(batch(1)).square().sum()
    (loss + both.train()(batch(2)).square().sum()).backward()
    for (name, p), q, r in zip(both.named_parameters(), alone.parameters(), second.parameters()):
        torch.testing.assert_close(p.grad, q.grad + r.grad, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_hooks_on_a_folded_layer_are_an_error():
    network = qat.prepare(randomize(Residual()), (batch(0),))
    prune.l1_unstructured(network.conv1.conv, "weight", 0.5)
    with pytest.raises(qat.QATError, match=r"conv1: found hooks .* before qat\.prepare"):
        network(batch(0))
