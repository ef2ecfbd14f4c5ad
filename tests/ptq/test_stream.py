"""Batches in front of each quantized layer are what the whole networks compute there, and no more than that is held."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qat
from qat.graph.stream import Stream, float_copy


class Forked(nn.Module):
    """Two inputs, a dictionary between nodes, a residual, a tuple of chunks, and one layer called twice on different grids."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(2, 4, 1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.split = nn.Conv2d(4, 8, 3, padding=1, groups=2)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor, y: Tensor, gain: float = 2.0) -> Tensor:
        branch = {"a": F.relu(self.left(x)), "b": self.right(y) * gain}
        z = self.twice(branch["a"]) + branch["b"]
        z = F.relu(self.twice(z)) + branch["a"]
        one, other = torch.chunk(self.split(z), 2, 1)
        return self.fc((one * other).mean((2, 3)))


ORDER = ["left", "right", "twice", "twice", "split", "fc"]


@pytest.fixture
def batches():
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, c, 6, 6, generator=generator) for c in (3, 2)) for n in (3, 3, 2)]


@pytest.fixture
def prepared(batches):
    torch.manual_seed(0)
    prepared = qat.prepare(Forked().eval(), batches[0], qat.QATConfig(fold="static", weight=qat.QuantSpec(bits=3)))
    qat.calibrate(prepared, batches)
    return prepared


def seen_by_hooks(network, batch):
    """(name, input, output, scale of the input) of each layer call in a run of the whole network."""
    calls = []
    layers = {name: m for name, m in network.named_modules() if isinstance(m, qat.FoldedConvBN)}

    def record(name):
        return lambda layer, args, out: calls.append((name, args[0].detach(), out.detach(), layer.input_quantizer.scale.clone()))

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    with torch.no_grad():
        network(*batch)
    for handle in handles:
        handle.remove()
    return calls


def test_inputs_are_those_of_the_whole_networks(prepared, batches):
    exact = float_copy(prepared)
    expected = [[seen_by_hooks(network, batch) for batch in batches] for network in (prepared, exact)]
    stream = Stream([prepared, exact], (batch for batch in batches))
    stops = []
    for k, stop in enumerate(stream):
        stops.append((stop.name, stop.call, stop.calls))
        assert stop.layers == (prepared.get_submodule(stop.name), exact.get_submodule(stop.name))
        for network in (0, 1):
            for i, x in enumerate(stream.inputs(network)):
                name, seen, out, scale = expected[network][i][k]
                assert name == stop.name and torch.equal(x, seen) and not x.requires_grad
                # The layer has been told of this call's input, whatever batch went before.
                assert torch.equal(stop.layers[network](x), out) and torch.equal(stop.layers[network].input_quantizer.scale, scale)
    assert stops == [("left", 0, 1), ("right", 0, 1), ("twice", 0, 2), ("twice", 1, 2), ("split", 0, 1), ("fc", 0, 1)]
    assert [k[0] for k in expected[0][0]] == ORDER
    assert not torch.equal(expected[0][0][2][3], expected[0][0][3][3]), "the two calls of one layer should read different grids"


def test_a_float_copy_computes_the_float_function(batches):
    torch.manual_seed(0)
    model = Forked().eval()
    prepared = qat.prepare(model, batches[0], qat.QATConfig(weight=qat.QuantSpec(bits=3)))
    qat.calibrate(prepared, batches)
    state = {key: value.clone() for key, value in prepared.state_dict().items()}
    torch.testing.assert_close(float_copy(prepared)(*batches[0]), model(*batches[0]))
    assert all(torch.equal(value, state[key]) for key, value in prepared.state_dict().items())


def test_batches_go_on_through_a_layer_as_it_was_changed(prepared, batches):
    exact = float_copy(prepared)
    stream = Stream([prepared, exact], batches)
    held = {}
    for stop in stream:
        if stop.name == "left":
            stop.layers[0].write_weight(stop.layers[0].weight_to_quantize() * 0.5)
        held[stop.name, stop.call] = [[x.clone() for x in stream.inputs(network)] for network in (0, 1)]
    changed = [seen_by_hooks(prepared, batch) for batch in batches]
    for i in range(len(batches)):
        for (name, call), inputs in held.items():
            k = ORDER.index(name) + call
            assert torch.equal(inputs[0][i], changed[i][k][1])
    assert torch.equal(held["twice", 0][1][0], seen_by_hooks(exact, batches[0])[2][1])


def test_outputs_are_those_of_the_layers_as_they_are_set(prepared, batches):
    with torch.no_grad():
        expected = [prepared(*batch) for batch in batches]
        stream = Stream([prepared], batches)
        for stop in stream:
            assert all(torch.equal(got, want) for got, want in zip(stream.outputs(), expected))
            if stop.name == "split":
                stop.layers[0].weight_fold.mul_(2)
                changed = [prepared(*batch) for batch in batches]
                assert all(torch.equal(got, want) for got, want in zip(stream.outputs(), changed))
                assert not torch.equal(changed[0], expected[0])
                break


class Watched(nn.Module):
    """Notes how many of the tensors it was given or made are alive when it is called; a leaf of a captured network."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref] = []
        self.alive: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.alive.append(sum(ref() is not None for ref in self.made))
        y = x * 2
        self.made.append(weakref.ref(y))
        return y


def test_one_batch_at_a_time_has_tensors_inside_a_segment():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Watched(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)).eval()
    batches = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    config = qat.QATConfig(fold="static", overrides={"1": {"skip": True}})
    prepared = qat.prepare(model, (batches[0],), config).eval()
    qat.calibrate(prepared, batches)
    watched = prepared.get_submodule("1")
    watched.made.clear(), watched.alive.clear()
    pictures = [weakref.ref(x) for x in batches]

    def given_away():
        while batches:
            yield batches.pop(0)

    names = []
    for stop in Stream([prepared], given_away()):
        names.append(stop.name)
        alive = sum(ref() is not None for ref in watched.made)
        assert alive == 0, "what only the segment read is held after it"
        # The quantized pictures are what the first layer reads: the pictures themselves are free at once, but for the generator's last.
        assert sum(ref() is not None for ref in pictures) <= 1
    assert names == ["0", "3", "4"] and watched.alive == [0, 0, 0, 0]


def test_a_network_without_batches_says_so(prepared, batches):
    with pytest.raises(qat.QATError, match="batches: found none"):
        next(iter(Stream([prepared], [])))
    used = iter(batches)
    list(used)
    with pytest.raises(qat.QATError, match="batches: found none"):
        next(iter(Stream([prepared], used)))
    with pytest.raises(qat.QATError, match="a tensor of shape"):
        Stream([prepared], batches[0][0])
    with pytest.raises(qat.QATError, match="a batch of 1 items for a network of 2 inputs"):
        next(iter(Stream([prepared], [batches[0][:1]])))


def test_inputs_left_out_have_their_defaults(batches):
    """`gain` has a default, which a batch may give."""
    torch.manual_seed(0)
    config = qat.QATConfig(fold="static", overrides={"gain": {"skip": True}})
    prepared = qat.prepare(Forked().eval(), (*batches[0], torch.tensor(2.0)), config)
    qat.calibrate(prepared, batches)
    with torch.no_grad():
        for given in (batches[0], (*batches[0], torch.tensor(3.0))):
            stream = Stream([prepared], [given])
            assert [stop.name for stop in stream] == ORDER
            assert torch.equal(next(stream.outputs()), prepared(*given))
        assert not torch.equal(prepared(*batches[0]), prepared(*batches[0], torch.tensor(3.0)))


GRIDS = {
    "uint8": {},
    "int8": {"activation": qat.QuantSpec(per_channel=False, narrow=False)},
    "4 bits, learned": {"activation": qat.QuantSpec(bits=4, symmetric=False, per_channel=False), "activation_range": "lsq"},
}


@pytest.mark.parametrize("grid", GRIDS)
def test_quantized_tensors_are_held_as_their_integers(grid):
    """Also behind a pool, which keeps the grid; and they come back to the bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)).eval()
    x = [torch.randn(2, 3, 8, 8), torch.randn(3, 3, 8, 8), torch.randn(0, 3, 8, 8)]
    prepared = qat.prepare(model, (x[0],), qat.QATConfig(fold="static", **GRIDS[grid])).eval()
    qat.calibrate(prepared, x[:2])
    whole = [seen_by_hooks(prepared, batch) for batch in map(lambda one: (one,), x)]
    made = []
    for module in prepared.modules():
        if isinstance(module, (qat.FakeQuantizer, nn.MaxPool2d)):
            module.register_forward_hook(lambda m, args, out: made.append(weakref.ref(out)))
    names = []
    stream = Stream([prepared], x)
    for k, stop in enumerate(stream):
        alive = [ref() for ref in made if ref() is not None]
        assert made and not any(y.numel() for y in alive), "a tensor of floats is held"
        del alive
        for i, got in enumerate(stream.inputs()):
            assert torch.equal(got, whole[i][k][1]) and got.dtype == torch.float32
        names.append(stop.name)
    assert names == ["0", "3", "4"]


def test_tensors_off_the_grid_are_held_as_they_are(prepared, batches):
    """A network without quantized activations, and one whose quantizers are switched off on the way."""
    qat.set_fake_quant(prepared, activations=False)
    expected = [seen_by_hooks(prepared, batch) for batch in batches]
    stream = Stream([prepared], batches)
    for k, _ in enumerate(stream):
        assert all(torch.equal(x, expected[i][k][1]) for i, x in enumerate(stream.inputs()))
