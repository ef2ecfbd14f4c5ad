import math

import pytest
import torch
from torch import nn

from qat.errors import ConfigError
from qat.quant import FakeQuantizer, QuantSpec
from qat.train.optim import build_optimizer, build_schedule, scale_learning_rate, split_parameters

OPTIM = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "schedule": "cosine", "warmup_steps": 0, "min_lr": 0.0}


@pytest.fixture
def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.PReLU(), FakeQuantizer(QuantSpec(per_channel=False), range="lsq"))


def test_every_parameter_once_and_only_weights_decay(network):
    parts = split_parameters(network)
    assert [len(parts[name]) for name in ("weights", "plain", "quantizers")] == [1, 4, 1]
    optimizer = build_optimizer(network, {**OPTIM, "scale_lr": 0.001})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1, 0.001]
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in network.parameters()}


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_optimizers_step(network, name):
    optimizer = build_optimizer(network[:3], {**OPTIM, "name": name})
    network[:3](torch.randn(2, 1, 5, 5)).sum().backward()
    optimizer.step()


def rates(schedule, optimizer, steps):
    seen = []
    for step in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        schedule.step_update(step + 1)
    return seen


def test_cosine_after_linear_warm_up(network):
    optimizer = build_optimizer(network, OPTIM)
    seen = rates(build_schedule(optimizer, {**OPTIM, "warmup_steps": 4}, 20), optimizer, 20)
    assert seen[:4] == pytest.approx([0.02, 0.04, 0.06, 0.08])
    assert seen[4:] == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 20)) for t in range(4, 20)])


def test_constant(network):
    optimizer = build_optimizer(network, OPTIM)
    assert rates(build_schedule(optimizer, {**OPTIM, "schedule": "constant"}, 5), optimizer, 10) == pytest.approx([0.1] * 10)


def test_a_scaled_rate_holds_from_the_next_step_and_travels_with_the_optimizer(network):
    optimizer = build_optimizer(network, OPTIM)
    schedule = build_schedule(optimizer, OPTIM, 10)
    schedule.step_update(4)
    before = optimizer.param_groups[0]["lr"]
    scale_learning_rate(optimizer, 0.1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * before)
    other = build_optimizer(network, OPTIM)
    again = build_schedule(other, OPTIM, 10)
    other.load_state_dict(optimizer.state_dict())
    again.load_state_dict(schedule.state_dict())
    for opt, sched in ((optimizer, schedule), (other, again)):
        sched.step_update(5)
        assert opt.param_groups[0]["lr"] == pytest.approx(0.1 * 0.05 * (1 + math.cos(math.pi * 0.5)))


@pytest.mark.parametrize(("key", "build"), [("name", build_optimizer), ("schedule", None)])
def test_unknown_names(network, key, build):
    with pytest.raises(ConfigError, match=rf"optim\.{key}: found 'sdg'"):
        wrong = {**OPTIM, key: "sdg"}
        build_optimizer(network, wrong) if build else build_schedule(build_optimizer(network, OPTIM), wrong, 5)
