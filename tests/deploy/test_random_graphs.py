"""Random networks: the trained network, convert(), integers alone and the runtime give the same integers at every tensor."""

import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn

import qat
from qat.deploy.verify import verify_integers, verify_trained

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import randomize

X = torch.randn(48, 3, 12, 12, generator=torch.Generator().manual_seed(7))
C = 8
ACTIVATIONS = [nn.Identity, nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, lambda: nn.LeakyReLU(0.1)]


class RandomNetwork(nn.Module):
    """A stem and a chain of steps, each (kind, activation, skip): skips reach back to an earlier tensor of the same shape."""

    def __init__(self, steps, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), nn.BatchNorm2d(C), nn.ReLU())
        self.steps = steps
        self.layers = nn.ModuleList(nn.Sequential(*self.layer(kind), ACTIVATIONS[act]()) for kind, act, _ in steps)
        self.head = nn.Linear(C, 5)

    @staticmethod
    def layer(kind):
        return {
            "conv": [nn.Conv2d(C, C, 3, padding=1, bias=False), nn.BatchNorm2d(C)],
            "grouped": [nn.Conv2d(C, C, 3, padding=1, groups=2, padding_mode="reflect"), nn.BatchNorm2d(C)],
            "depthwise": [nn.Conv2d(C, C, 3, padding=1, groups=C), nn.BatchNorm2d(C)],
            "pointwise": [nn.Conv2d(C, C, 1), nn.BatchNorm2d(C)],
            "transposed": [nn.ConvTranspose2d(C, C, 3, padding=1), nn.BatchNorm2d(C)],
            "add": [nn.Identity()],
            "concat": [nn.Conv2d(2 * C, C, 1), nn.BatchNorm2d(C)],
            "multiply": [nn.Identity()],
            "maxpool": [nn.MaxPool2d(3, 1, 1)],
            "avgpool": [nn.AvgPool2d(3, 1, 1)],
        }[kind]

    def forward(self, x):
        seen = [self.stem(x)]
        for (kind, _, skip), layer in zip(self.steps, self.layers):
            x, other = seen[-1], seen[skip % len(seen)]
            if kind == "add":
                x = x + other
            elif kind == "multiply":
                x = x * torch.sigmoid(other)
            elif kind == "concat":
                x = torch.cat([x, other], 1)
            seen.append(layer(x))
        return self.head(F.adaptive_avg_pool2d(seen[-1], 1).flatten(1))


KINDS = "conv grouped depthwise pointwise transposed add concat multiply maxpool avgpool".split()
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, len(ACTIVATIONS) - 1), st.integers(0, 9)), min_size=1, max_size=5)
GRIDS = st.sampled_from(["ort_vnni", "ort_x86", "openvino", "tensorrt", "integer_only"])


def build(steps, seed, target):
    model = randomize(RandomNetwork(steps, seed), seed).eval()
    prepared = qat.prepare(model, (X,), qat.QATConfig.for_target(target))
    qat.calibrate(prepared, [X])
    return prepared, qat.convert(prepared)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 5), GRIDS, st.sampled_from(["float", "fixed"]))
def test_convert_equals_integers_alone(steps, seed, target, multipliers):
    _, converted = build(steps, seed, target)
    report = verify_integers(converted, [X], multipliers)
    assert report.max_lsb <= 1 and report.identical >= 0.999, f"{steps}\n{report}"


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 5), GRIDS)
def test_the_trained_network_equals_convert(steps, seed, target):
    prepared, converted = build(steps, seed, target)
    report = verify_trained(prepared, converted, [X])
    assert report.max_lsb <= 1 and report.identical >= 0.999, f"{steps}\n{report}"


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 5), st.sampled_from(["ort_vnni", "ort_x86"]))
def test_the_file_equals_convert(tmp_path_factory, steps, seed, target):
    _, converted = build(steps, seed, target)
    path = qat.export_onnx(converted, (X,), tmp_path_factory.mktemp("random") / "m.onnx")
    for runtime in ("onnxruntime", "onnxruntime_unoptimized"):
        report = qat.verify(converted, path, [X], runtime)
        assert report.max_lsb <= 1 and report.identical >= 0.999, f"{steps}\n{report}"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 1000), GRIDS, st.sampled_from(["float", "fixed"]))
def test_many_more(steps, seed, target, multipliers):
    _, converted = build(steps, seed, target)
    report = verify_integers(converted, [X], multipliers)
    assert report.max_lsb <= 1 and report.identical >= 0.999, f"{steps}\n{report}"
