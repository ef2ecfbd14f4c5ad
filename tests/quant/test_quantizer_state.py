"""What a quantizer lives through: checkpoints, copies, precisions, calibration, compilation."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from qat.errors import QATError
from qat.quant import RANGES, FakeQuantizer, QuantSpec

SPECS = [QuantSpec(4), QuantSpec(4, False), QuantSpec(4, per_channel=False), QuantSpec(4, False, False)]
KINDS = [(name, running) for name in [*RANGES, "lsq"] for running in (True, False)]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def reload(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name, running", KINDS)
def test_state_dict_round_trip_resizes_and_keeps_the_switches(spec, name, running):
    quantizer = FakeQuantizer(spec, name, running=running)
    for seed in range(2):
        quantizer(normal(6, 10, seed=seed))
    quantizer.freeze()
    quantizer.enabled = name != "mse"
    other = FakeQuantizer(spec, name, running=running)
    other.load_state_dict(reload(quantizer.state_dict()))
    assert (other.enabled, other.observing, other.initialized) == (quantizer.enabled, False, True)
    x = normal(6, 10, seed=4)
    assert torch.equal(quantizer(x), other(x))
    for each in (quantizer, other):  # and both go on alike
        each.unfreeze()
        each.enabled = True
        each(normal(6, 10, seed=5) * 3)
    assert torch.equal(quantizer.scale, other.scale) and torch.equal(quantizer.extent, other.extent)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["ema", "lsq"])
def test_fresh_state_round_trips_too(spec, name):
    other = FakeQuantizer(spec, name)
    other(normal(3, 4))
    other.load_state_dict(reload(FakeQuantizer(spec, name).state_dict()))
    assert not other.initialized
    assert torch.equal(other.eval()(normal(5, 4)), normal(5, 4)) or not other.running


def test_loading_into_a_parent_resizes_parameters_in_place():
    source, target = (nn.ModuleDict({"q": FakeQuantizer(QuantSpec(4, False), "lsq")}) for _ in range(2))
    source["q"](normal(7, 5))
    held = list(target.parameters())
    target.load_state_dict(reload(source.state_dict()))
    assert all(a is b and a.shape == (7,) for a, b in zip(held, target.parameters()))


def test_per_channel_state_does_not_fit_a_per_tensor_quantizer():
    source = FakeQuantizer(QuantSpec(4))
    source(normal(7, 5))
    with pytest.raises(QATError, match="per_channel=True"):
        FakeQuantizer(QuantSpec(4, per_channel=False)).load_state_dict(source.state_dict())


@pytest.mark.parametrize("name, running", KINDS)
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_are_equal_and_independent(name, running, clone):
    quantizer = FakeQuantizer(QuantSpec(4), name, running=running)
    quantizer(normal(6, 10, seed=1).requires_grad_())
    quantizer.freeze()
    twin = clone(quantizer)
    x = normal(6, 10, seed=2)
    assert torch.equal(quantizer(x), twin(x)) and not twin.observing
    with torch.no_grad():
        twin.scale.mul_(2)
    assert not torch.equal(quantizer.scale, twin.scale)


@pytest.mark.parametrize("name, running", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_calibration_under_inference_mode_does_not_break_training(name, running, spec):
    quantizer = FakeQuantizer(spec, name, running=running)
    with torch.inference_mode():
        for seed in range(2):
            quantizer(normal(6, 10, seed=seed))
        quantizer.freeze(normal(6, 10))
    quantizer.unfreeze()
    x = normal(6, 10, seed=3).requires_grad_()
    for _ in range(2):
        quantizer(x).square().sum().backward()
    assert x.grad.abs().sum() > 0
    if name == "lsq":
        torch.optim.SGD(quantizer.parameters(), lr=0.1).step()
    assert not any(t.is_inference() for t in quantizer.state_dict().values() if isinstance(t, torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["ema", "lsq", "minmax"])
def test_half_module_keeps_float32_state(dtype, name):
    quantizer = FakeQuantizer(QuantSpec(8, False, False), name, running=True)
    quantizer(normal(30) * 1e-6)
    before = quantizer.scale.detach().clone()
    quantizer.to(dtype)
    assert quantizer.scale.dtype == quantizer.extent.dtype == torch.float32
    assert torch.equal(before, quantizer.scale)
    assert quantizer(normal(30).to(dtype)).dtype == dtype
    assert quantizer.scale.dtype == torch.float32


@pytest.mark.parametrize("name", ["ema", "lsq", "minmax", "mse", "percentile"])
def test_bf16_autocast(name):
    layer, quantizer = nn.Linear(8, 8), FakeQuantizer(QuantSpec(8, False, False), name, running=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = quantizer(layer(normal(4, 8)))
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert quantizer.scale.dtype == torch.float32 and torch.isfinite(layer.weight.grad).all()


@pytest.mark.parametrize("name, running", KINDS)
def test_float64(name, running):
    x = normal(4, 30).double()
    converted, adapted = (FakeQuantizer(QuantSpec(4, False), name, running=running) for _ in range(2))
    converted.double()
    outs = []
    for quantizer in (converted, adapted):
        outs.append(quantizer(x))
        assert quantizer.scale.dtype == torch.float64
        quantizer.freeze()
        assert_close(quantizer(x), outs[-1], rtol=0, atol=0)
    assert torch.equal(*outs)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", ["ema", "lsq"])
def test_frozen_quantizer_compiles_to_one_graph(spec, name):
    quantizer = FakeQuantizer(spec, name, running=True)
    quantizer(normal(6, 10))
    quantizer.freeze()
    torch.compiler.reset()
    compiled = torch.compile(quantizer, fullgraph=True, backend="eager")
    for mode in (quantizer.train, quantizer.eval):
        mode()
        x = normal(6, 10, seed=1).requires_grad_()
        y = x.detach().clone().requires_grad_()
        expected, out = quantizer(x), compiled(y)
        assert torch.equal(out, expected)
        expected.square().sum().backward()
        out.square().sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_a_state_dict_holds_tensors_alone():
    assert all(isinstance(value, torch.Tensor) for value in FakeQuantizer(QuantSpec()).state_dict().values())


@pytest.mark.parametrize("other", [QuantSpec(bits=4), QuantSpec(symmetric=False), QuantSpec(narrow=False), QuantSpec(power_of_two=True)])
def test_the_state_of_another_grid_is_refused(other):
    mine, theirs = FakeQuantizer(QuantSpec(per_channel=False)), FakeQuantizer(other)
    with pytest.raises(QATError, match="the state of a QuantSpec"):
        mine.load_state_dict(theirs.state_dict())
