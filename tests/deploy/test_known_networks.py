"""The networks that people bring first: folded, prepared, trained a step, converted, and the smaller ones run as a file."""

import sys
from pathlib import Path

import pytest
import timm
import torch
import torchvision

import qat

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import randomize

# (source, name, BatchNorms folded, picture size)
NETWORKS = [
    ("torchvision", "resnet18", 20, 64),
    ("torchvision", "resnet50", 53, 64),
    ("torchvision", "mobilenet_v2", 52, 64),
    ("timm", "resnet18", 20, 64),
    ("timm", "resnet50", 53, 64),
    ("timm", "mobilenetv1_100", 27, 64),
    ("timm", "mobilenetv2_100", 52, 64),
    ("timm", "mobilenetv3_large_100", 46, 64),
    ("timm", "fasternet_t0", 17, 64),
    ("timm", "efficientformer_l1", 33, 224),
]


def build(source, name):
    torch.manual_seed(0)
    return randomize(timm.create_model(name) if source == "timm" else torchvision.models.get_model(name, weights=None))


@pytest.mark.parametrize(("source", "name", "folded", "size"), NETWORKS)
def test_a_known_network_folds_trains_and_converts(source, name, folded, size):
    model = build(source, name).eval()
    # Two pictures whose last maps are 1x1 give a BatchNorm two values to normalise: its gradients explode in the float network too.
    x = torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))
    plain = qat.fold(model, (x,))
    expected = model(x).detach()
    torch.testing.assert_close(plain(x).detach(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
    assert len(plain.fold_report.folded) == folded

    prepared = qat.prepare(model.train(), (x,))
    assert prepared.fold_report.folded == plain.fold_report.folded and prepared.fold_report.left == plain.fold_report.left
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-6)
    loss = torch.nn.functional.cross_entropy(prepared(x), torch.arange(4))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in prepared.parameters())

    qat.calibrate(prepared, [x])
    prepared.eval()
    converted = qat.convert(prepared)
    last = [node.target for node in converted.graph.nodes if node.op == "call_module" and node.target.startswith("quantizers.")][-1]
    scale = converted.get_submodule(last).scale
    with torch.no_grad():
        difference = (converted(x) - prepared(x)).abs().max() / scale
    # Float sums decide a rounding in 50000 otherwise than integer sums do, and random weights let such a step grow from layer to layer.
    assert difference <= 4.001, "last tensor, in LSB"


def test_norms_that_depend_on_each_input_are_left_with_that_reason():
    model = build("timm", "efficientformer_l1")
    report = qat.fold(model, (torch.zeros(2, 3, 224, 224),)).fold_report
    assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules()) == len(report.folded)
    assert len(report.left) == 3 and all("depends on each input" in reason for _, reason in report.left)


@pytest.mark.parametrize(("source", "name"), [("timm", "resnet18"), pytest.param("torchvision", "mobilenet_v2", marks=pytest.mark.slow)])
def test_a_known_network_runs_as_a_file(source, name, tmp_path):
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    prepared = qat.prepare(build(source, name).eval(), (x,))
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    report = qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x, x[:1]])
    assert report.max_lsb <= 1 and report.identical >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("source", "name", "folded", "size"), NETWORKS)
def test_every_known_network_runs_as_a_file(source, name, folded, size, tmp_path):
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    prepared = qat.prepare(build(source, name).eval(), (x,))
    qat.calibrate(prepared, [x])
    converted = qat.convert(prepared)
    report = qat.verify(converted, qat.export_onnx(converted, (x,), tmp_path / "m.onnx"), [x, x[:1]])
    assert report.identical >= 0.999, report
