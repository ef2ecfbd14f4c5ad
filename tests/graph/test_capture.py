"""What a captured forward computes, operation by operation, and the three ways out where it cannot be captured."""

import copy
import operator
import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_networks import randomize
from torch import Tensor, nn

import qat

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(2))
Two = namedtuple("Two", "a b")


@dataclass
class Pair:
    a: Tensor
    b: Tensor


class Straight(torch.autograd.Function):
    """Rounds; its gradient is ten times straight through."""

    @staticmethod
    def forward(ctx, x):
        return (x * 64).round() / 64

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


class Network(nn.Module):
    """Layers, and a forward given from outside."""

    def __init__(self, forward: Any):
        super().__init__()
        self.conv, self.bn, self.conv2, self.fc = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Linear(4, 5)
        self.factor = nn.Parameter(torch.full((4, 1, 1), 0.3))
        self.register_buffer("shift", torch.linspace(-1, 1, 4).view(4, 1, 1))
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self._forward = forward

    def norm(self, x):
        return self.bn(self.conv(x))

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def no_grad_block(m, x):
    with torch.no_grad():
        gate = torch.sigmoid(m.conv2(F.relu(m.conv(x))))
    return m.norm(x) * gate


def asserts(m, x):
    assert x.shape[1] == 3 and x.dim() == 4
    return m.norm(x)


def static_branch(m, x):
    if x.shape[2] > 4:
        x = x[:, :, 1:]
    y = m.norm(x)
    return y + m.conv2(y) if y.shape == x.shape or y.size(1) == 4 else y


def sizes(m, x):
    n, _, h, w = x.shape
    return m.norm(x).view(n, 4, h * w).mean(-1)


def functional(m, x):
    y = F.conv2d(x, m.conv.weight, m.conv.bias, 1, 1)
    return F.batch_norm(y, m.bn.running_mean, m.bn.running_var, m.bn.weight, m.bn.bias, False, 0.1, 1e-5)


def changes_its_input(m, x):
    x += 1
    return m.norm(x)


def adds_in_place(m, x):
    y = m.norm(x)
    y += m.conv2(y)
    return y


def loops(m, x):
    y = m.norm(x) if len(x.shape) == 4 else x
    parts = [part * (i + 1) for i, part in enumerate(y.chunk(len(y.split(2, 1)), 1))]
    return operator.sub(*parts)


FORWARDS = {
    "loops": (loops, (X,)),
    "starred_input": (lambda m, xs: operator.add(*[m.norm(xs[0]), *xs[1:]]), ((X, Y),)),
    "relu": (lambda m, x: F.relu(m.norm(x)), (X,)),
    "add": (lambda m, x: m.norm(x) + m.conv2(m.conv(x)), (X,)),
    "iadd": (adds_in_place, (X,)),
    "operator_iadd": (lambda m, x: operator.iadd(m.conv2(m.conv(x)), m.norm(x)), (X,)),
    "cat": (lambda m, x: torch.cat([m.norm(x), x], 1), (X,)),
    "flatten_mean": (lambda m, x: m.fc(torch.flatten(m.norm(x).mean((2, 3)), 1)), (X,)),
    "interpolate": (lambda m, x: F.interpolate(m.norm(x), scale_factor=2.0, mode="bilinear"), (X,)),
    "chunk": (lambda m, x: operator.sub(m.norm(x).chunk(2, 1)[1], m.conv2(m.conv(x)).chunk(2, 1)[0]), (X,)),
    "split": (lambda m, x: torch.cat(torch.split(m.norm(x), [1, 3], 1)[::-1], 1), (X,)),
    "getitem": (lambda m, x: m.norm(x)[:, 1:3, ::2], (X,)),
    "list": (lambda m, x: [m.norm(x), x], (X,)),
    "dict": (lambda m, x: {"a": m.norm(x), "b": m.conv2(m.conv(x))}, (X,)),
    "namedtuple": (lambda m, x: Two(m.norm(x), m.conv2(m.conv(x))), (X,)),
    "dataclass": (lambda m, x: Pair(m.norm(x), m.conv2(m.conv(x))), (X,)),
    "list_input": (lambda m, xs: m.norm(xs[0]) + xs[1], ([X, Y],)),
    "dict_input": (lambda m, xs: m.norm(xs["x"]) + xs["y"], ({"x": X, "y": Y},)),
    "dataclass_input": (lambda m, xs: m.norm(xs.a) + xs.b, (Pair(X, Y),)),
    "namedtuple_input": (lambda m, xs: m.norm(xs.a) + xs.b, (Two(X, Y),)),
    "several_inputs": (lambda m, x, y: (m.norm(x), y * m.conv2(y)), (X, Y)),
    "called_twice": (lambda m, x: m.block(m.block(m.norm(x))), (X,)),
    "parameter_and_buffer": (lambda m, x: m.norm(x) * m.factor + m.shift, (X,)),
    "functional_layers": (functional, (X,)),
    "autograd_function": (lambda m, x: Straight.apply(m.norm(x)), (X,)),
    "no_grad": (no_grad_block, (X,)),
    "asserts": (asserts, (X,)),
    "static_branch": (static_branch, (X,)),
    "sizes": (sizes, (X,)),
    "changes_its_input": (changes_its_input, (X,)),
    "weight_shape": (lambda m, x: m.norm(x) if m.conv.weight.shape[1] == 3 else x, (X,)),
}


def network(forward: Any) -> nn.Module:
    torch.manual_seed(0)
    return randomize(Network(forward)).eval()


def tensors(y: Any) -> list[Tensor]:
    if isinstance(y, Pair):
        return [y.a, y.b]
    return [y] if isinstance(y, Tensor) else [t for part in (y.values() if isinstance(y, dict) else y) for t in tensors(part)]


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    for g, e in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FORWARDS)
def test_folded_prepared_and_converted_compute_the_forward(name):
    forward, inputs = FORWARDS[name]
    model, before = network(forward), [t.clone() for t in tensors(inputs)]
    expected = model(*copy.deepcopy(inputs))
    folded, prepared = qat.fold(model, inputs), qat.prepare(model, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(inputs))), "the example was changed"
    qat.set_fake_quant(prepared, weights=False, activations=False)
    assert_same(folded(*copy.deepcopy(inputs)), expected)
    assert_same(prepared(*copy.deepcopy(inputs)), expected)
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [copy.deepcopy(inputs)])
    quantized, integers = tensors(prepared(*copy.deepcopy(inputs))), tensors(qat.convert(prepared)(*copy.deepcopy(inputs)))
    for q, i, e in zip(quantized, integers, tensors(expected), strict=True):
        torch.testing.assert_close(i, q, rtol=0, atol=0.01 * float(e.detach().abs().max()))
        assert float((q - e).detach().abs().max()) <= 0.06 * float(e.detach().abs().max())


@pytest.mark.parametrize("name", ["list_input", "dict_input", "namedtuple_input", "dataclass_input"])
def test_every_tensor_of_a_structured_input_is_quantized(name):
    forward, inputs = FORWARDS[name]
    prepared = qat.prepare(network(forward), inputs)
    assert sum(n.startswith("quantizers.get") for n, _ in prepared.named_modules()) == 2
    assert prepared.get_submodule("conv").input_quantizer is not None


# Where each parameter of the network lives once it is prepared.
HOMES = {
    "no_grad": {"conv.weight": "conv.weight_fold", "bn.weight": "bn.bn.weight", "conv2.weight": "conv2.weight_fold"},
    "autograd_function": {"conv.weight": "conv.conv.weight", "bn.weight": "conv.bn.weight"},
    "several_inputs": {"conv.weight": "conv.conv.weight", "bn.weight": "conv.bn.weight", "conv2.weight": "conv2.weight_fold"},
    "called_twice": {"conv.weight": "conv.conv.weight", "block.0.weight": "block.0.weight_fold", "block.1.weight": "block.1.bn.weight"},
}


@pytest.mark.parametrize("name", HOMES)
def test_gradients_are_those_of_the_forward(name):
    forward, inputs = FORWARDS[name][0], tuple(x.double() for x in FORWARDS[name][1])
    model = network(forward).double().train()
    prepared = qat.prepare(model, inputs, qat.QATConfig(fold="naive"))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    for each in (model, prepared):
        sum((t * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in tensors(each(*inputs))).backward()
    for here, there in HOMES[name].items():
        wanted, got = model.get_parameter(here).grad, prepared.get_parameter(there).grad
        if (name, here) == ("no_grad", "conv2.weight"):
            assert wanted is None and got is None
        else:
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-10)


def test_functional_layers_are_reported_with_their_source_line():
    report = qat.prepare(network(functional), (X,)).fold_report
    reasons = dict(report.left)
    assert re.search(r"functional call.*test_capture\.py:\d+: return F\.batch_norm", reasons["batch_norm"])
    assert any(re.search(r"^conv2d: functional call.*test_capture\.py:\d+: y = F\.conv2d", note) for note in report.notes)


def test_a_branch_on_a_shape_is_told():
    notes = qat.fold(network(static_branch), (X,)).fold_report.notes
    assert re.search(r"answered from example_inputs \(True\), at .*test_capture\.py:\d+: if x\.shape\[2\] > 4", notes[0])
    assert qat.fold(network(asserts), (X,)).fold_report.notes == []


def batch_branch(m, x):
    if x.shape[0] > 2:
        x = x * 2
    return m.conv(x)


def test_a_branch_on_the_batch_size_is_refused():
    with pytest.raises(qat.CaptureError, match=r"if x\.shape\[0\] > 2"):
        qat.fold(network(batch_branch), (X,))


@pytest.mark.parametrize("forward", [lambda m, x: sum(m.conv(x)), lambda m, x: m.conv(x) * len(x)])
def test_a_loop_over_the_batch_is_refused(forward):
    with pytest.raises(qat.CaptureError, match=r"batch size \(.*test_capture\.py:\d+"):
        qat.fold(network(forward), (X,))


def training_branch(m, x):
    y = m.norm(x)
    return y * 2 if m.training else y


def test_a_branch_on_training_is_told_or_followed():
    prepared = qat.prepare(network(training_branch).train(), (X,))
    assert prepared.fold_report.notes == ["forward differs between training and evaluation: the evaluation branch was captured"]


class Options(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x, mode, y=None, size=(4, 4), *, scale=1.0, fast=False):
        x = self.bn(self.conv(x))
        if mode == "pool":
            x = F.adaptive_avg_pool2d(x, size)
        if y is not None:
            x = x + y
        return -x if fast else x * scale


@pytest.mark.parametrize(
    ("inputs", "constants"),
    [
        ((X,), {"mode": "pool"}),
        ((X,), {"mode": "pool", "size": (2, 3), "scale": 3.0}),
        ((X, Y[:, :, :6, :6]), {"mode": "whole"}),
        ((X,), {"mode": "whole", "fast": True, "y": None}),
    ],
)
def test_concrete_arguments_are_fixed_in_the_network(inputs, constants):
    model = randomize(Options()).eval()
    expected = model(**dict(zip("xy", inputs)), **constants)
    prepared = qat.prepare(model, inputs, concrete_args=constants)
    assert prepared.fold_report.folded == [("conv", "bn")]
    qat.set_fake_quant(prepared, weights=False, activations=False)
    assert_same(prepared(*inputs), expected)
    assert_same(qat.fold(model, inputs, concrete_args=constants)(*inputs), expected)
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [inputs])
    torch.testing.assert_close(qat.convert(prepared)(*inputs), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))


def test_an_unknown_concrete_argument_is_refused():
    with pytest.raises(qat.ConfigError, match=r"concrete_args: found 'mod'.*Did you mean 'mode'"):
        qat.prepare(Options(), (X,), concrete_args={"mod": "pool"})


class Gate(nn.Module):
    """Branches on values."""

    def __init__(self, pair=False):
        super().__init__()
        self.conv, self.bn, self.pair = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), pair

    def forward(self, x):
        y = self.bn(self.conv(x))
        if y.sum() > 0:
            y = y * 2
        return (y, -y) if self.pair else y


class Gated(nn.Module):
    def __init__(self, pair=False):
        super().__init__()
        self.first, self.bn, self.gate, self.last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Gate(pair), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.gate(self.bn(self.first(x)))
        return self.last(y[0] + y[1] * 0.5 if self.gate.pair else y)


def test_control_flow_names_module_line_and_three_ways_out():
    with pytest.raises(qat.CaptureError) as error:
        qat.prepare(Gated(), (X,))
    message = str(error.value)
    assert error.value.where == "gate" and re.search(r"test_capture\.py:\d+: if y\.sum\(\) > 0", message)
    for way in ("overrides={'gate': {'leaf': True}}", "overrides={'gate': {'skip': True}}", "concrete_args={"):
        assert way in message


@pytest.mark.parametrize("pair", [False, True], ids=["tensor", "pair"])
@pytest.mark.parametrize("way", ["leaf", "skip"])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_module_kept_whole(strategy, way, pair):
    torch.manual_seed(0)
    model = randomize(Gated(pair)).eval()
    overrides = {"gate": {way: True}}
    prepared = qat.prepare(model, (X,), qat.QATConfig(fold=strategy, overrides=overrides))
    assert prepared.fold_report.folded == [("first", "bn")]
    assert [name for name, _ in prepared.fold_report.left] == ["gate.bn"]
    qat.set_fake_quant(prepared, weights=False, activations=False)
    assert_same(prepared(X), model(X))
    assert_same(prepared(-X), model(-X))
    assert_same(qat.fold(model, (X,), overrides)(X), model(X))
    quantizers = {n.removeprefix("quantizers.") for n, _ in prepared.named_modules() if n.startswith("quantizers.")}
    outputs = {"getitem", "getitem_1"} if pair else {"gate"}
    assert quantizers & outputs == (outputs if way == "leaf" else set())
    qat.set_fake_quant(prepared)
    qat.calibrate(prepared, [X, -X])
    converted = qat.convert(prepared)
    for x in (X, -X):
        torch.testing.assert_close(converted(x), prepared(x), rtol=0, atol=0.03 * float(model(x).detach().abs().max()))
        torch.testing.assert_close(prepared(x), model(x), rtol=0, atol=0.05 * float(model(x).detach().abs().max()))


@pytest.mark.parametrize("way", ["leaf", "skip"])
def test_a_layer_kept_whole_stays_float_with_its_norm(way):
    model = randomize(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))).eval()
    prepared = qat.prepare(model, (X,), qat.QATConfig(overrides={"0": {way: True}}))
    assert type(prepared.get_submodule("0")) is nn.Conv2d
    assert prepared.fold_report.left == [("1", "'0' is skipped, or kept whole, by an override")]
    assert hasattr(prepared.quantizers, "_0") == (way == "leaf")


@pytest.mark.parametrize("call", [qat.fold, lambda model, x, o: qat.prepare(model, x, qat.QATConfig(overrides=o))])
@pytest.mark.parametrize(("overrides", "words"), [({"gaet": {"leaf": True}}, "gate"), ({"gate": {"leaf": 1}}, "true or false")])
def test_overrides_that_say_nothing_are_refused(call, overrides, words):
    with pytest.raises(qat.QATError, match=words):
        call(Gated(), (X,), overrides)


def test_the_guide_runs():
    guide = (Path(__file__).parents[2] / "docs" / "capture.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) >= 4
    space: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "docs/capture.md", "exec"), space)


class Needs(nn.Module):
    def forward(self, x, scale, n=2):
        return x * scale * n


@pytest.mark.parametrize("concrete", [None, {"n": 3}])
def test_a_missing_argument_takes_no_other_ones_value(concrete):
    with pytest.raises(qat.CaptureError, match="missing a value for 'scale'"):
        qat.prepare(Needs(), (torch.ones(2, 3),), concrete_args=concrete)


class ReadsBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.register_buffer("mean", torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x):
        return self.conv(x - self.mean.view(1, -1, 1, 1))


def test_a_buffer_stays_the_networks_own():
    x = torch.randn(4, 3, 5, 5)
    model, other = ReadsBuffer().eval(), ReadsBuffer().eval()
    other.mean.mul_(3)
    prepared = qat.prepare(model, (x,))
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x))
    torch.testing.assert_close(qat.fold(other, (x,))(x), other(x))
    qat.load_float(prepared, other.state_dict())
    torch.testing.assert_close(prepared(x), other(x))


class ReadsOwn(nn.Module):
    """Something of the layer or of its BatchNorm is read a second time, by the forward itself."""

    def __init__(self, what):
        super().__init__()
        self.what, self.conv, self.bn = what, nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.bn(self.conv(x))
        if self.what == "weight":
            return y + F.conv2d(x, self.conv.weight, padding=1)
        tensor = {"bias": self.conv.bias, "gamma": self.bn.weight, "var": self.bn.running_var}[self.what]
        return y * (1 + tensor.view(1, -1, 1, 1))


@pytest.mark.parametrize("what", ["weight", "bias", "gamma", "var"])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_pair_that_the_forward_reads_is_left(strategy, what):
    x = torch.randn(6, 3, 7, 7)
    model = randomize(ReadsOwn(what)).train()
    prepared = qat.prepare(model, (x,), qat.QATConfig(fold=strategy))
    ((name, reason),) = prepared.fold_report.left
    assert name == "bn" and "the forward reads it" in reason
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x))
    prepared(x).square().sum().backward()
    model(x).square().sum().backward()
    found = {key.replace("bn.bn.", "bn.").removesuffix("_fold"): p.grad for key, p in prepared.named_parameters()}
    for key, p in model.named_parameters():
        torch.testing.assert_close(found[key], p.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(prepared.eval()(x), model.eval()(x))


def test_a_tied_decoder_stays_float():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 4)

        def forward(self, x):
            return torch.relu(self.encoder(x)) @ self.encoder.weight

    x, model = torch.randn(8, 6), Tied().eval()
    prepared = qat.prepare(model, (x,))
    assert any("encoder: stays float, shares a parameter with the forward" in note for note in prepared.fold_report.notes)
    qat.set_fake_quant(prepared, weights=False, activations=False)
    torch.testing.assert_close(prepared(x), model(x))
