"""AdaRound finds the best rounding where all can be tried, betters nearest, stays on the grid, and ships what it chose."""

import copy
import io
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rounding_reference import best_rounding
from torch import Tensor, nn

import qat
from qat.graph.lifecycle import folded_layers
from qat.graph.stream import Stream, float_copy
from qat.ptq import adaround as adaround_step
from qat.ptq.adaround import fused_activation
from qat.ptq.reconstruction import Problem, draw
from qat.ptq.rounding import both_roundings, check_grid, hard_codes, start
from qat.ptq.settings import Settings

sys.path.insert(0, str(Path(__file__).parents[1] / "gates"))
from gate_network import WEIGHTS, gate_network, images, settings

W3 = qat.QuantSpec(bits=3)


def correlated(count, inputs, seed=0, dtype=torch.float64):
    """Inputs as a ReLU gives them, which share much of what they vary by: there the nearest rounding is not the best."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(inputs, inputs, generator=generator, dtype=torch.float64) / inputs**0.5
    return torch.relu(torch.randn(count, inputs, generator=generator, dtype=torch.float64) @ mixing + 0.5).to(dtype)


def problem_of(x, target, scale, bias=None, activation=lambda y: y, size=32):
    """Of x (M, K) and targets (M, C_out)."""
    size = min(size, len(x))
    wrapped = [torch.cat((one, one[:size])).T.unsqueeze(0).contiguous() for one in (x, target)]
    bias = x.new_zeros(target.shape[1]) if bias is None else bias
    return Problem(*wrapped, len(x), size, scale.view(1, -1, 1), bias.view(1, -1, 1), activation, torch.tensor(True))


def solved(problem, weight, scale, spec, **options):
    lower, up = both_roundings(weight, scale, spec)
    h = problem.solve(start(weight, scale), lower, up, Settings(**options), torch.Generator().manual_seed(0))
    return hard_codes(lower, up, h), h


@pytest.mark.parametrize("act", [None, torch.relu])
def test_nearly_the_best_of_all_roundings_is_found(act):
    """256 choices for each of two channels, which do not see each other; the inputs of the quantized network are not the float ones."""
    apply, relu = act or (lambda y: y), (lambda y: np.maximum(y, 0)) if act else (lambda y: y)
    shares = []
    for seed in range(8):
        x = correlated(300, 8, seed)
        generator = torch.Generator().manual_seed(seed)
        seen = x + torch.randn(x.shape, generator=generator, dtype=x.dtype) * 0.05
        weight = torch.randn(2, 8, generator=generator, dtype=x.dtype)
        scale, bias = weight.abs().amax(1) / 3, torch.tensor([0.3, -0.2], dtype=x.dtype)
        target = apply(x @ weight.T + bias)
        problem = problem_of(seen, target, scale, bias, apply, size=100)
        codes, _ = solved(problem, weight, scale, W3, iterations=400, lr=3e-2)
        ours, best, nearest = 0.0, 0.0, 0.0
        for channel in (0, 1):
            s, b, t = float(scale[channel]), float(bias[channel]), target[:, channel].numpy()

            def error(q, s=s, b=b, t=t, seen=seen):
                return float(((relu(seen.numpy() @ (s * q) + b) - t) ** 2).mean())

            steps = (weight[channel] / s).numpy()
            ours += error(codes[channel].double().numpy())
            best += best_rounding(steps, 1.0, W3.qmin, W3.qmax, error)[1]
            nearest += error(np.clip(np.rint(steps), W3.qmin, W3.qmax))
        assert float(problem.error(codes)) == pytest.approx(ours, rel=1e-9)
        shares.append((ours / best, nearest / best))
    mean = np.mean(shares, 0)
    assert mean[1] > 2 and mean[0] < (1.06 if act else 1.25), shares


def test_one_weight_is_rounded_as_its_activation_asks():
    """w = 0.6, s = 1, b = -0.3."""
    spec, one = W3, torch.ones(1, 1, dtype=torch.float64)
    weight, scale, bias = 0.6 * one, torch.ones(1, dtype=torch.float64), torch.tensor([-0.3], dtype=torch.float64)
    behind = problem_of(-one.repeat(4, 1), torch.zeros(4, 1, dtype=torch.float64), scale, bias, torch.relu)
    assert [float(behind.error(torch.tensor([[q]]))) for q in (0, 1)] == [0.0, 0.0]
    # On x = 1 with the target 0.1: (0.7 - 0.1)^2 for 1, and (0 - 0.1)^2 for 0, since max(-0.3, 0) = 0.
    moved = problem_of(one.repeat(4, 1), 0.1 * one.repeat(4, 1), scale, bias, torch.relu)
    assert [float(moved.error(torch.tensor([[q]]))) for q in (0, 1)] == pytest.approx([0.01, 0.36])
    assert solved(moved, weight, scale, spec, iterations=300, lr=3e-2)[0].tolist() == [[0]]
    # Without the activation 0 gives (-0.3 - 0.1)^2.
    plain = problem_of(one.repeat(4, 1), 0.1 * one.repeat(4, 1), scale, bias)
    assert [float(plain.error(torch.tensor([[q]]))) for q in (0, 1)] == pytest.approx([0.16, 0.36])


def test_the_gradient_of_the_reconstruction():
    x = correlated(60, 5)
    target, scale = torch.randn(60, 4, dtype=torch.float64), torch.tensor([0.3, 0.5, 0.2, 0.4], dtype=torch.float64)
    problem = problem_of(x, target, scale, torch.randn(4, dtype=torch.float64), F.silu, size=16)
    weight = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    for first in (0, 7, 59):
        some = [(first + i) % 60 for i in range(16)]  # past the last sample come the first again
        loss = (F.silu(x[some] @ weight[0].T + problem.bias[0, :, 0]) - target[some]).square().sum(1).mean()
        (expected,) = torch.autograd.grad(loss, weight)
        torch.testing.assert_close(problem.gradient(weight.detach(), first), expected)


def test_regularisation_decides_and_nothing_does_without_it():
    x = correlated(100, 6)
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scale = weight.abs().amax(1) / 3
    problem = problem_of(x, x @ weight.T, scale)

    def undecided(**options):
        _, h = solved(problem, weight, scale, W3, iterations=300, lr=3e-2, **options)
        return float((h * (1 - h)).sum())

    assert undecided() < 0.05 < 0.5 < undecided(regularisation=0.0)
    assert undecided(warm_up=0.99) > 0.5, "while warming up nothing should regularise"


def test_the_regulariser_is_weighed_by_what_a_step_of_a_weight_does():
    """So that codes do not depend on the unit of the outputs, of any channel."""
    x = correlated(200, 6)
    weight = torch.randn(3, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scale, unit = weight.abs().amax(1) / 3, torch.tensor([1.0, 2.0**12, 2.0**-9], dtype=torch.float64)
    plain = problem_of(x, x @ weight.T, scale)
    scaled = problem_of(x, (x @ weight.T) * unit, scale * unit)
    # By definition: change one weight by a step, and look at the channel's output.
    changes = [[float(((x[:, k] * s) ** 2).mean()) for k in range(6)] for s in (scale * unit).tolist()]
    np.testing.assert_allclose(scaled.step_error().flatten().numpy(), np.mean(changes, 1), rtol=1e-12)
    options = {"iterations": 150, "lr": 3e-2}
    codes, h = solved(plain, weight, scale, W3, **options)
    others, g = solved(scaled, weight * unit.view(-1, 1), scale * unit, W3, **options)
    assert torch.equal(codes, others) and not torch.equal(codes, torch.round(weight / scale.view(-1, 1)).int())
    torch.testing.assert_close(h, g, atol=1e-9, rtol=0)


def test_weights_that_meet_nothing_but_zeros_are_rounded_to_nearest():
    """Whatever their size: a depthwise channel whose input is dead, beside one whose is not."""
    x = torch.cat((torch.zeros(1, 4, 60), torch.randn(1, 4, 60, generator=torch.Generator().manual_seed(0)).abs()))
    weight = torch.tensor([[3.4, -1.6, 2.3, 0.7], [0.3, 0.3, 0.3, 0.3]]) * torch.tensor([[1e3], [1.0]])
    scale = torch.tensor([1e3, 1.0])
    problem = Problem(
        torch.cat((x, x[..., :20]), 2),
        torch.zeros(2, 1, 80),
        60,
        20,
        scale.view(2, 1, 1),
        torch.zeros(2, 1, 1),
        lambda y: y,
        torch.tensor(True),
    )
    target = torch.bmm(weight.view(2, 1, 4), problem.x)
    codes, h = solved(replace(problem, target=target), weight, scale, qat.QuantSpec(bits=4), iterations=100, lr=5e-2)
    assert torch.isfinite(h).all() and codes[0].tolist() == [3, -2, 2, 1]
    assert codes[1].tolist() != [0, 0, 0, 0], "0.3 four times is nearer to 1 once than to 0"


def state_of(network):
    return {key: value.clone() for key, value in network.state_dict().items()}


def calibrated(strategy, spec, weight_range="minmax", dtype=torch.float32):
    prepared = qat.prepare(
        gate_network(dtype).eval(), (images(dtype=dtype),), qat.QATConfig(fold=strategy, weight=spec, weight_range=weight_range)
    )
    qat.calibrate(prepared, [images(dtype=dtype)])
    return prepared


def batches(dtype=torch.float32):
    return [images(seed, 8, dtype) for seed in range(3)]


QUICK = {"iterations": 80, "lr": 5e-2, "progress": False}


def codes_of(prepared):
    return {
        name: layer.weight_quantizer.codes(layer.weight_to_quantize())
        for name, layer in folded_layers(copy.deepcopy(prepared).eval()).items()
    }


def errors(report):
    """(nearest, ours) of each layer that was rounded otherwise."""
    return {name: tuple(map(float, what.split()[1:4:2])) for name, what in report.done if what.startswith("error")}


@pytest.mark.parametrize(
    "strategy, grid, weight_range", [*settings("minmax"), ("static", "w4_per_tensor", "mse"), ("naive", "w8_per_channel", "lsq")]
)
def test_every_strategy(strategy, grid, weight_range):
    """Residual, depthwise, grouped, transposed and linear layers, gammas of both signs."""
    spec = qat.QuantSpec(bits=3, per_channel=WEIGHTS[grid].per_channel)
    prepared = calibrated(strategy, spec, weight_range)
    prepared.train()
    before, original = state_of(prepared), copy.deepcopy(prepared).eval()
    rounded = adaround_step(prepared, (batch for batch in batches()), **QUICK)
    assert all(torch.equal(value, before[key]) for key, value in prepared.state_dict().items())
    assert prepared.step_reports == [] and rounded.training and all(m.training for m in folded_layers(rounded).values())

    (report,) = rounded.step_reports
    names = ["stem.0", "depthwise.0", "grouped.0", "up.0", "fc.0"]
    assert report.step == "adaround" and [name for name, _ in report.done] == names and report.left == []
    found = errors(report)
    assert len(found) >= 4 and all(ours < nearest for nearest, ours in found.values())
    codes, nearest = codes_of(rounded), codes_of(original)
    for name in names:
        layer, was = rounded.get_submodule(name), original.get_submodule(name)
        weight = was.weight_to_quantize()
        scale = was.weight_quantizer.qparams_for(weight)[0]
        check_grid(name, codes[name], weight, scale, spec)
        assert torch.equal(codes[name], nearest[name]) == (name not in found)
        assert torch.equal(layer.weight_quantizer.qparams_for(layer.weight_to_quantize())[0], scale), "the scale moved"
        assert torch.equal(layer.folded()[1], was.folded()[1]), "the bias moved"

    # What is shipped is what was chosen; for scale_merge with the sign of gamma.
    converted = qat.convert(rounded)
    for name in names:
        layer = copy.deepcopy(rounded).eval().get_submodule(name)
        sign = layer.factor.sign() if layer.behind_quantizer is not None else torch.ones(len(codes[name]))
        shipped = layer.weight_codes()[0]
        assert torch.equal(shipped, (codes[name] * sign.view([-1] + [1] * (codes[name].dim() - 1))).to(torch.int32))
        stored = converted.get_submodule(name)
        assert sorted(stored.codes.flatten().tolist()) == sorted(shipped.flatten().tolist())
        torch.testing.assert_close(stored.scale, layer.weight_codes()[1].float())

    # Held: neither another freeze nor a training step's observation moves the grid, and a second run has nothing left to choose.
    qat.freeze_ranges(rounded)
    assert all(torch.equal(value, codes[name]) for name, value in codes_of(rounded).items())
    again = adaround_step(rounded, batches(), **QUICK)
    assert all(torch.equal(value, codes[name]) for name, value in codes_of(again).items())
    assert errors(again.step_reports[1]) == {} and len(again.step_reports) == 2


def test_a_bias_correction_of_the_rounding_before_is_taken_out():
    prepared = calibrated("static", W3, "minmax")
    corrected = qat.ptq.correct_bias(prepared, batches())
    plain, rounded = (adaround_step(network, batches(), **QUICK) for network in (prepared, corrected))
    assert not torch.equal(corrected.get_submodule("stem.0").bias_fold, prepared.get_submodule("stem.0").bias_fold)
    for name, layer in folded_layers(rounded).items():
        assert all(torch.equal(a, b) for a, b in zip(layer.folded(), plain.get_submodule(name).folded())), name


def test_samples_are_the_quantized_inputs_and_the_float_outputs():
    """The last layer's, when those before it are rounded: all of the samples there are, in another order."""
    prepared = calibrated("static", W3)
    rounded = adaround_step(prepared, batches(), **QUICK).eval()
    exact = float_copy(prepared)
    stream = Stream([rounded, exact], batches())
    for stop in stream:
        if stop.name == "depthwise.0":
            break
    layer = stop.layers[0]
    scale = layer.weight_quantizer.qparams_for(layer.weight_to_quantize())[0]
    problem = draw(stream, stop.layers, scale, fused_activation(stop.node, rounded), 32, torch.Generator().manual_seed(0))
    seen, wished = {}, {}
    for network, place in ((rounded, seen), (exact, wished)):
        inside = network.get_submodule("depthwise.0")
        handle = inside.register_forward_hook(lambda m, x, y, place=place: place.setdefault("x", []).append((x[0], y)))
        for batch in batches():
            network(batch)
        handle.remove()
    x = torch.cat([F.unfold(x, 3, padding=1) for x, _ in seen["x"]]).transpose(1, 2).reshape(-1, 8, 9)
    y = F.relu6(torch.cat([y for _, y in wished["x"]])).permute(0, 2, 3, 1).reshape(-1, 8)
    assert problem.count == 24 * 36 and problem.size == 512
    expected = torch.cat((x.flatten(1), y), 1)
    got = torch.cat((problem.x.permute(2, 0, 1).flatten(1), problem.target.permute(2, 0, 1).flatten(1)), 1)
    assert torch.equal(got[problem.count :], got[: problem.size])
    got = got[: problem.count]
    assert not torch.equal(got, expected), "the order should be random"

    along = torch.randn(expected.shape[1], generator=torch.Generator().manual_seed(0))

    def ordered(rows):
        return rows[(rows @ along).argsort()]

    torch.testing.assert_close(ordered(got), ordered(expected.detach()), atol=1e-5, rtol=1e-5)
    # The bias is the one in the quantized layer's output: a multiple of s_x s_w.
    steps = problem.bias.flatten() / (scale * layer.input_quantizer.scale)
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert not torch.equal(problem.bias.flatten(), layer.folded()[1])
    with torch.no_grad():
        missed = F.relu6(torch.cat([y for _, y in seen["x"]])).permute(0, 2, 3, 1).reshape(-1, 8) - y
    assert float(problem.error(layer.weight_codes()[0])) == pytest.approx(float(missed.double().square().sum(1).mean()), rel=1e-4)


def test_correlated_inputs_are_reconstructed_better_through_the_whole_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6)).eval()
    x = correlated(512, 24, dtype=torch.float32)
    prepared = qat.prepare(model, (x,), qat.QATConfig(fold="static", weight=qat.QuantSpec(bits=3)))
    qat.calibrate(prepared, [x])
    rounded = adaround_step(prepared, x.split(128), iterations=200, lr=3e-2, progress=False)
    fresh = correlated(512, 24, seed=0, dtype=torch.float32)[256:] * 0.9

    def missed(network):
        with torch.no_grad():
            return float((network.eval()(fresh) - model(fresh)).square().mean())

    assert missed(rounded) < 0.65 * missed(prepared)


def test_the_same_seed_gives_the_same_codes():
    prepared = calibrated("static", W3)
    runs = [codes_of(adaround_step(prepared, batches(), seed=seed, **QUICK)) for seed in (1, 1, 2)]
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert any(not torch.equal(runs[0][name], runs[2][name]) for name in runs[0])
    # Nor does it move the random state that others use.
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    adaround_step(prepared, batches(), layers=["fc.0"], **QUICK)
    assert torch.equal(torch.rand(3), expected)


def test_nearest_rounding_is_kept_where_the_other_is_worse(monkeypatch):
    prepared = calibrated("static", W3)
    monkeypatch.setattr(Problem, "solve", lambda self, v, lower, up, *rest: 1.0 - hard_codes(0 * lower, up, v + 0.5))
    rounded = adaround_step(prepared, batches(), **QUICK)
    nearest = codes_of(prepared)
    assert all(torch.equal(codes, nearest[name]) for name, codes in codes_of(rounded).items())
    (report,) = rounded.step_reports
    assert len(report.done) == 5 and all(what.startswith("nearest rounding kept: error ") for _, what in report.done)


def test_layers_by_pattern_and_layers_that_are_left():
    prepared = calibrated("bn_correction", W3)
    prepared.get_submodule("stem.0").weight_quantizer.enabled = False
    rounded = adaround_step(prepared, batches(), layers=["stem.*", "fc.0", "up*"], **QUICK)
    (report,) = rounded.step_reports
    assert [name for name, _ in report.done] == ["up.0", "fc.0"]
    assert report.left == [
        ("stem.0", "its weight quantization is switched off"),
        ("depthwise.0", "not asked for"),
        ("grouped.0", "not asked for"),
    ]
    before, after = prepared.state_dict(), rounded.state_dict()
    changed = {key.split(".")[0] for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {"up", "fc"}
    assert "adaround: 2 done, 3 left" in str(report)


class Shared(nn.Module):
    """One layer at two places, on two grids; a PReLU behind a function call that takes its weight as an input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.slope = nn.Parameter(torch.full((3,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return self.last(F.prelu(self.conv(y), self.slope))


def test_a_layer_that_is_called_twice_is_rounded_by_its_first_call():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 5)
    prepared = qat.prepare(Shared().eval(), (x,), qat.QATConfig(fold="static", weight=W3))
    qat.calibrate(prepared, [x])
    rounded = adaround_step(prepared, [x], **QUICK)
    done = dict(rounded.step_reports[0].done)
    assert list(done) == ["conv", "last"] and done["conv"].endswith("; by the first of its calls") and "calls" not in done["last"]
    qat.convert(rounded)


class Doubled(nn.Conv2d):
    """Linear in weight and input, but its weights do not meet its input as it is."""

    def forward(self, x):
        return super().forward(x * 2.5)


class Flipped(nn.Conv2d):
    """Weights meet inputs of other channels, which only the outputs show."""

    def forward(self, x):
        return super().forward(x.flip(1))


@pytest.mark.parametrize("kind", [Doubled, Flipped])
def test_a_layer_that_does_more_than_weigh_its_inputs_is_left(kind):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 6, 6)
    model = nn.Sequential(kind(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 3, 1))
    prepared = network_of(model, x)
    qat.calibrate(prepared, [x])
    rounded = adaround_step(prepared, [x], **QUICK)
    (report,) = rounded.step_reports
    assert [name for name, _ in report.done] == ["2"]
    assert report.left == [("0", f"the forward of this {kind.__name__} does more than weigh its inputs")]
    assert torch.equal(rounded.get_submodule("0").weight_fold, prepared.get_submodule("0").weight_fold)


def network_of(model, x):
    return qat.prepare(model.eval(), (x,), qat.QATConfig(fold="static", weight=W3))


class Then(nn.Module):
    """conv, then what is done with its output."""

    def __init__(self, then, act=None):
        super().__init__()
        self.conv, self.then, self.act = nn.Conv2d(3, 4, 1), then, act

    def forward(self, x):
        return self.then(self, self.conv(x))


ACTIVATIONS = {
    "none": (lambda m, y: y.mean((2, 3)), None, lambda y: y),
    "module": (lambda m, y: m.act(y), nn.ReLU6(), F.relu6),
    "in place": (lambda m, y: m.act(y), nn.ReLU(inplace=True), F.relu),
    "a slope for each channel": (lambda m, y: m.act(y), nn.PReLU(4, init=0.3), lambda y: torch.where(y > 0, y, 0.3 * y)),
    "function with a keyword": (lambda m, y: F.leaky_relu(y, negative_slope=0.2), None, lambda y: F.leaky_relu(y, 0.2)),
    "function with arguments": (lambda m, y: torch.clamp(y, -0.5, 0.7), None, lambda y: y.clamp(-0.5, 0.7)),
    "method": (lambda m, y: y.relu(), None, F.relu),
    "method with arguments": (lambda m, y: y.clamp(min=-0.1), None, lambda y: y.clamp(min=-0.1)),
    "two readers": (lambda m, y: F.relu(y) + y, None, lambda y: y),
    "a slope that the graph reads": (lambda m, y: F.prelu(y, m.act), nn.Parameter(torch.full((4,), 0.3)), lambda y: y),
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_activation_inside_the_loss(kind):
    then, act, expected = ACTIVATIONS[kind]
    prepared = network_of(Then(then, act), torch.randn(2, 3, 4, 4))
    node = next(node for node in prepared.graph.nodes if node.target == "conv")
    y = torch.randn(50, 4)
    torch.testing.assert_close(fused_activation(node, prepared)(y.clone()), expected(y))


def test_hard_layers():
    """A dead filter and a layer of zeros; more pictures asked for than there are; batches of different sizes, one of them empty."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(64, 3))
    model[0].weight.data[1] = 0
    model[2].weight.data.zero_()
    x = torch.randn(6, 3, 6, 6)
    prepared = network_of(model, x)
    qat.calibrate(prepared, [x])
    rounded = adaround_step(prepared, [x[:4], x[:0], x[4:]], batch_size=1000, **QUICK)
    codes = codes_of(rounded)
    assert not codes["0"][1].any() and codes["0"][0].any() and not codes["2"].any()
    assert all(torch.isfinite(value.double()).all() for value in rounded.state_dict().values())
    assert dict(rounded.step_reports[0].done)["2"].startswith("nearest rounding kept: error ")


def test_float64_networks():
    prepared = calibrated("bn_correction", W3, dtype=torch.float64)
    rounded = adaround_step(prepared, batches(torch.float64), **QUICK)
    assert len(errors(rounded.step_reports[0])) >= 4
    assert all(p.dtype == torch.float64 for p in rounded.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(dtype)
    x = [batch.to(dtype) for batch in batches()]
    prepared = network_of(network, x[0])
    qat.calibrate(prepared, x)
    rounded = adaround_step(prepared, x, **QUICK)
    assert [name for name, _ in rounded.step_reports[-1].done] == ["0", "3"]
    for name, layer in folded_layers(rounded).items():
        was = prepared.get_submodule(name)
        check_grid(name, layer.weight_codes()[0], was.weight_to_quantize(), was.weight_scale(), W3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_device():
    prepared = calibrated("bn_correction", W3).cuda()
    rounded = adaround_step(prepared, [batch.cuda() for batch in batches()], **QUICK)
    assert len(errors(rounded.step_reports[0])) >= 4 and all(p.is_cuda for p in rounded.parameters())
    codes, here = codes_of(rounded), codes_of(adaround_step(calibrated("bn_correction", W3), batches(), **QUICK))
    same = [float((codes[name].cpu() == here[name]).double().mean()) for name in here]
    assert min(same) > 0.8


def test_the_file_gives_the_integers_of_the_rounded_network(tmp_path):
    rounded = adaround_step(calibrated("bn_correction", qat.QuantSpec(bits=4)), batches(), **QUICK).eval()
    converted = qat.convert(rounded)
    path = qat.export_onnx(converted, (images(),), tmp_path / "model.onnx")
    report = qat.verify(converted, path, [images(7)])
    assert report.max_lsb <= 1 and report.identical > 0.999


def test_an_interruption_leaves_the_network_as_it_was(monkeypatch):
    prepared = calibrated("naive", W3)
    before, calls = state_of(prepared), []
    solve = Problem.solve

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return solve(self, *args)

    monkeypatch.setattr(Problem, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adaround_step(prepared, batches(), **QUICK)
    assert all(torch.equal(value, before[key]) for key, value in prepared.state_dict().items()) and prepared.step_reports == []
    assert all(m.enabled for m in prepared.modules() if isinstance(m, qat.FakeQuantizer))


def test_bad_input_is_one_line():
    prepared = calibrated("static", W3)
    nan = images()
    nan[3, 1, 2, 2] = float("nan")
    used = iter(batches())
    list(used)
    uncalibrated = qat.prepare(gate_network().eval(), (images(),), qat.QATConfig(fold="static"))
    for said, call in {
        "no activation quantizers": lambda: adaround_step(gate_network(), batches()),
        "Call qat.calibrate": lambda: adaround_step(uncalibrated, batches()),
        "batches: found none": lambda: adaround_step(prepared, used),
        "a tensor of shape": lambda: adaround_step(prepared, images()),
        "only batches without pictures": lambda: adaround_step(prepared, [images()[:0]]),
        r"stem\.0: found NaN or Inf": lambda: adaround_step(prepared, [images(), nan]),
        r"adaround\.layers: found 'stem'.*Did you mean stem\.0": lambda: adaround_step(prepared, batches(), layers=["stem"]),
        r"Write layers=\['fc\.0'\]": lambda: adaround_step(prepared, batches(), layers="fc.0"),
        r"adaround\.iterations: found 0": lambda: adaround_step(prepared, batches(), iterations=0),
        r"adaround\.iterations: found 2\.5": lambda: adaround_step(prepared, batches(), iterations=2.5),
        r"adaround\.batch_size: found 0": lambda: adaround_step(prepared, batches(), batch_size=0),
        r"adaround\.lr: found nan": lambda: adaround_step(prepared, batches(), lr=float("nan")),
        r"adaround\.regularisation: found -1": lambda: adaround_step(prepared, batches(), regularisation=-1),
        r"adaround\.warm_up: found 1": lambda: adaround_step(prepared, batches(), warm_up=1),
        r"adaround\.beta: found \(2, 20\)": lambda: adaround_step(prepared, batches(), beta=(2, 20)),
    }.items():
        with pytest.raises(qat.QATError, match=said) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_weights_that_gamma_cannot_carry_are_named():
    """gamma / sigma is subnormal in one channel: whatever is written, its folded filter is 0."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    prepared = qat.prepare(model.eval(), (torch.randn(2, 3, 6, 6),), qat.QATConfig(fold="bn_correction", weight=W3))
    prepared.get_submodule("0").bn.weight.data[2] = 0.0
    x = torch.randn(8, 3, 6, 6)
    qat.calibrate(prepared, [x])
    rounded = adaround_step(prepared, [x], **QUICK)
    assert not codes_of(rounded)["0"][2].any() and rounded.step_reports[0].done[0][1].startswith("error")
    assert torch.equal(rounded.get_submodule("0").conv.weight[2], prepared.get_submodule("0").conv.weight[2])


def test_ptq_is_reached_from_qat():
    assert qat.ptq.adaround is adaround_step and "ptq" in dir(qat)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("wanted, stream, shown", [(True, Terminal, True), (False, Terminal, False), (True, io.StringIO, False)])
def test_a_bar_on_standard_error_of_a_terminal(monkeypatch, capsys, wanted, stream, shown):
    for key in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(sys, "stderr", stream())
    adaround_step(calibrated("static", W3), batches(), layers=["fc.0"], iterations=3, progress=wanted)
    assert ("adaround" in sys.stderr.getvalue()) == shown and capsys.readouterr().out == ""
