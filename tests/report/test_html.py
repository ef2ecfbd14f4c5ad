import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qat.fold import STRATEGIES
from qat.quant import FakeQuantizer, QuantSpec
from qat.report.html import write_report
from qat.report.plots import curves
from qat.report.tables import quantizer_table, span

VOID = {"meta", "br", "link", "path", "use", "rect", "image"}


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def network():
    network = nn.Sequential(
        STRATEGIES["bn_correction"](nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), FakeQuantizer(QuantSpec())),
        FakeQuantizer(QuantSpec(symmetric=False, per_channel=False), range="ema"),
    )
    network.fold_report = SimpleNamespace(folded=[("conv<1>", "bn1")], left=[("norm", "depends on each input")], notes=[])
    network(torch.randn(4, 1, 6, 6))
    return network


def write(folder, network, **changes):
    result = {
        "status": "ok",
        "recipe": "a<b",
        "fold": "bn_correction",
        "seed": 0,
        "weight_bits": 8,
        "activation_bits": 8,
        "per_channel": True,
        "accuracy": {"float": 1.0, "ptq": 0.25, "fake_quant": 0.75, "integer": 0.75},
        "parity": {"identical": 1.0, "max_lsb": 0},
        "freeze_step": 3,
        "steps": 4,
        "seconds": {"qat": 1.5},
        "peak_memory_mb": 10.0,
    } | changes
    metrics = [{"step": 0.0, "train_loss_step": 2.0}, {"step": 3.0, "train_loss_step": 1.0, "val_loss": 1.5, "val_acc": 0.5}]
    row = SimpleNamespace(name="quantizers.x", compared=100, identical=1.0, max_lsb=0)
    parity = SimpleNamespace(tensors=(row,), identical=1.0, max_lsb=0)
    path = write_report(folder, result, metrics, network, parity, torch.tensor([[3, 1], [0, 0]]), ["one", "two"])
    return path.read_text(encoding="utf-8")


def test_one_file_that_needs_no_network_and_fits_a_phone(tmp_path, network):
    text = write(tmp_path, network)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert all(link.startswith(("#", "data:")) for link in links)
    assert "@import" not in text and "url(http" not in text and "<script" not in text
    assert 'name="viewport"' in text and "overflow-x: auto" in text and "max-width" in text


def test_what_it_shows(tmp_path, network):
    text = write(tmp_path, network)
    assert text.count("<svg") == 3
    for expected in (
        "BN frozen at 3",
        "conv&lt;1&gt;",
        "depends on each input",
        "a&lt;b",
        "0.weight_quantizer",
        "quantizers.x",
        "seconds: qat",
    ):
        assert expected in text, expected
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []


def test_a_run_without_a_freeze_and_without_metrics(tmp_path, network):
    assert "BN frozen" not in write(tmp_path, network, freeze_step=None)
    assert "<svg" in curves([], None, 0.5)


def test_weights_show_the_scale_of_the_folded_weight(network):
    layer = network[0]
    with torch.no_grad():
        layer.bn.weight.mul_(3)
    row = next(row for row in quantizer_table(network).rows if row[0] == "0.weight_quantizer")
    assert row[3] == span(layer.integer()[1])
    assert row[1:3] == ["8 bits, symmetric", "3 channels"]
    assert float(row[6]) == pytest.approx(float(layer.folded()[0].detach().abs().max()), rel=1e-3)
