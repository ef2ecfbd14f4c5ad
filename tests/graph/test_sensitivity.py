"""What each layer's quantizers cost, against networks prepared with everything else skipped."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_networks import Residual, randomize
from torch import nn

import qat
from qat.errors import ConfigError, QATError
from qat.graph.lifecycle import activation_quantizers, folded_layers
from qat.graph.sensitivity import layer_losses, layer_quantizers, readings

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 5


class Mixed(nn.Module):
    """A max-pool, a layer called twice on different grids, an addition, a concatenation and a mean."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.relu, self.pool = (
            nn.Conv2d(3, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.twice, self.join = nn.Conv2d(6, 6, 1), nn.ReLU()
        self.last, self.last_norm, self.fc = nn.Conv2d(12, 8, 1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.pool(self.relu(self.norm(self.stem(x))))
        y = self.twice(self.twice(x))
        y = torch.cat([self.join(y + x), x], 1)
        return self.fc(self.last_norm(self.last(y)).mean((2, 3)))


# Layer -> the graph nodes whose tensors it has; those with weights are modules too.
LAYERS = {
    "x": ["x"],
    "stem": ["relu"],
    "twice": ["twice", "twice_1"],
    "add": ["join"],
    "cat": ["cat"],
    "last": ["last"],
    "mean": ["mean"],
    "fc": ["fc"],
}


@torch.no_grad()
def loss(network):
    return float(F.cross_entropy(network(X) * 4, Y))


def network(model=Mixed, seed=0):
    torch.manual_seed(seed)
    return randomize(model()).eval()


def config(fold="bn_correction", overrides=None, **ranges):
    weight = qat.QuantSpec(bits=3)
    activation = qat.QuantSpec(bits=4, symmetric=False, per_channel=False)
    return qat.QATConfig(fold=fold, weight=weight, activation=activation, overrides=overrides or {}, **ranges)


def prepared(model=Mixed, **options):
    made = qat.prepare(network(model), (X,), config(**options))
    qat.calibrate(made, [X])
    return made


def skipping(names, whole):
    """Prepared with the layers of these names skipped, its other quantizers those of `whole`."""
    tensors = {node for name in names for node in LAYERS[name]} | ({"last_norm"} if "last" in names else set())  # it stays, unfolded
    modules = {name for name in names if name in folded_layers(whole)}
    made = qat.prepare(network(), (X,), config(overrides={name: {"skip": True} for name in sorted(tensors | modules)}))
    if any(isinstance(module, qat.FakeQuantizer) and module.running for module in made.modules()):
        qat.calibrate(made, [X])
    known = dict(whole.named_modules())
    for name, module in made.named_modules():
        if isinstance(module, qat.FakeQuantizer) and name in known:
            module.load_state_dict(known[name].state_dict())
    return made.eval()


def test_layers_are_what_overrides_can_name():
    made = prepared()
    assert list(layer_quantizers(made)) == list(LAYERS)
    names = {module: name for name, module in made.named_modules()}
    for layer, nodes in LAYERS.items():
        weight = [f"{layer}.weight_quantizer"] if layer in folded_layers(made) else []
        assert [names[q] for q in layer_quantizers(made)[layer]] == [*weight, *(f"quantizers.{node}" for node in nodes)]
        rule = {layer: {"activation": {"bits": 7}} | ({"weight": {"bits": 7}} if weight else {})}
        again = layer_quantizers(prepared(overrides=rule))
        assert {name for name, quantizers in again.items() if any(q.spec.bits == 7 for q in quantizers)} == {layer}
        assert all(q.spec.bits == 7 for q in again[layer])


@pytest.mark.parametrize("layer", LAYERS)
def test_one_layer_alone_and_all_others_are_what_skipping_the_rest_gives(layer):
    made = prepared()
    (found,) = [row for row in layer_losses(made, loss) if row.name == layer]
    nothing, everything = loss(skipping(LAYERS, made)), loss(made.eval())
    alone, others = loss(skipping(set(LAYERS) - {layer}, made)), loss(skipping({layer}, made))
    assert found.alone == pytest.approx(alone - nothing, abs=1e-5)
    assert found.others == pytest.approx(everything - others, abs=1e-5)
    assert max(abs(found.alone), abs(found.others)) > 5e-4  # the comparison is not one of zeros


@pytest.mark.parametrize("fold", qat.STRATEGIES)
def test_the_network_is_left_as_it_was(fold):
    made = prepared(fold=fold).train()
    made.pool.eval()
    made.get_submodule("quantizers.cat").enabled = False
    made.twice.set_input_quantizer(made.get_submodule("quantizers.relu"))
    before, modes = copy.deepcopy(made.state_dict()), [m.training for m in made.modules()]

    def unchanged():
        assert all(torch.equal(value, before[key]) for key, value in made.state_dict().items())
        assert [m.training for m in made.modules()] == modes
        return made.twice.input_quantizer is made.get_submodule("quantizers.relu")

    rows = layer_losses(made, loss)
    assert unchanged() and "cat" not in {row.name for row in rows} and {row.name for row in rows} == set(LAYERS) - {"cat"}
    calls = []

    def fails(network):
        calls.append(loss(network))
        if len(calls) == 5:
            raise RuntimeError("no loss")
        return 0.0

    with pytest.raises(RuntimeError, match="no loss"):
        layer_losses(made, fails)
    assert unchanged()


def test_a_module_used_at_several_places_is_several_layers():
    found = layer_quantizers(prepared(Residual))
    assert list(found) == ["x", "stem.0", "conv1", "conv2", "add", "mean", "fc"]
    assert [q.name for q in found["conv1"]] == ["conv1.weight_quantizer", "quantizers.act"]
    assert [q.name for q in found["add"]] == ["quantizers.act_1"]


def test_biases_are_rounded_only_where_a_layer_and_its_input_are_on():
    """A bias far above the grid of its sums: rounding it changes the output of the layer by as much as nothing else does."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)

        def forward(self, x):
            return self.two(self.one(x)).mean((2, 3))

    made = prepared(Two)
    seen = {}

    def watched(network):
        on = {name: q.enabled for name, q in [*activation_quantizers(made).items(), ("one", made.one.weight_quantizer)]}
        bias = made.one.integer_layer(X)[1]
        seen[tuple(on.values())] = torch.equal(bias, made.one.folded()[1])
        return 0.0

    layer_losses(made, watched)
    rounded = {(x, weight) for (x, *_, weight), exact in seen.items() if not exact}
    assert rounded == {(True, True)} and len({(x, weight) for x, *_, weight in seen}) == 4


def test_only_one_kind_is_measured_where_one_is_asked_for():
    made, calls = prepared(), []

    def counted(network):
        calls.append(network)
        return 1.0

    assert all(row.others is None and row.alone == 0 for row in layer_losses(made, counted, "alone"))
    assert len(calls) == len(LAYERS) + 2 and all(network is made for network in calls)
    assert all(row.alone is None and row.others == 0 for row in layer_losses(made, counted, only="others"))
    found = readings(made, lambda network: network(X), "others")
    assert not found.alone and torch.equal(found.quantized, made.eval()(X)) and not torch.equal(found.quantized, found.unquantized)


def test_learned_scales_and_ranges_of_constants():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.scale = nn.Conv2d(3, 5, 1), nn.Parameter(torch.rand(5, 1, 1))

        def forward(self, x):
            return (self.conv(x) * self.scale).mean((2, 3))

    made = prepared(Scaled, weight_range="lsq", activation_range="lsq")
    rows = {row.name: row for row in layer_losses(made, loss)}
    assert set(rows) == {"x", "conv", "scale", "mul", "mean"} and rows["scale"].alone != 0


def test_bad_input_is_refused():
    made = prepared()
    with pytest.raises(ConfigError, match="only: found 'both'"):
        layer_losses(made, loss, "both")
    qat.set_fake_quant(made, weights=False, activations=False)
    with pytest.raises(QATError, match="no quantizer switched on"):
        layer_losses(made, loss)
    with pytest.raises(QATError, match="no range yet"):
        layer_losses(qat.prepare(network(), (X,), config()), loss)
    with pytest.raises(QATError, match=r"expected a network from qat\.prepare"):
        layer_losses(network(), loss)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_on_a_gpu():
    made = prepared()
    expected = layer_losses(made, loss)
    made.cuda()
    found = layer_losses(made, lambda network: float(F.cross_entropy(network(X.cuda()).cpu() * 4, Y)))
    for one, other in zip(found, expected):
        assert one.alone == pytest.approx(other.alone, abs=1e-2) and one.others == pytest.approx(other.others, abs=1e-2)
