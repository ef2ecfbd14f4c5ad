"""Bad input to conversion, export and verification: one line that says what to do, and nothing half-written."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qat
from qat.deploy.verify import signal_to_noise, verify_integers, verify_trained

sys.path.insert(0, str(Path(__file__).parents[1] / "graph"))
from small_networks import Residual, randomize

X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def networks():
    prepared = qat.prepare(randomize(Residual()).eval(), (X,))
    qat.calibrate(prepared, [X])
    return prepared, qat.convert(prepared)


def refused(expected, call):
    with pytest.raises(qat.QATError, match=expected) as caught:
        call()
    assert "\n" not in str(caught.value)


EXPORTS = {
    "a bare tensor": (lambda c, path: qat.export_onnx(c, X, path), "a tuple of tensors"),
    "no inputs": (lambda c, path: qat.export_onnx(c, (), path), "0 items for a network of 1 input"),
    "two inputs": (lambda c, path: qat.export_onnx(c, (X, X), path), "2 items"),
    "wrong channels": (lambda c, path: qat.export_onnx(c, (X[:, :2],), path), "Try the example inputs"),
    "doubles": (lambda c, path: qat.export_onnx(c, (X.double(),), path), "float32"),
    "a number": (lambda c, path: qat.export_onnx(c, (torch.tensor(1.0),), path), "first dimension is the batch"),
    "notes": (lambda c, path: qat.export_onnx(c, (X,), path, notes={"a": 1}), "a int"),
    "a folder": (lambda c, path: qat.export_onnx(c, (X,), path.parent), "no place for a file"),
    "no folder": (lambda c, path: qat.export_onnx(c, (X,), path.parent / "none" / "m.onnx"), "no place for a file"),
    "no converted network": (lambda c, path: qat.export_onnx(Residual(), (X,), path), "qat.convert"),
}


@pytest.mark.parametrize("kind", EXPORTS)
def test_export(networks, kind, tmp_path):
    call, expected = EXPORTS[kind]
    refused(expected, lambda: call(networks[1], tmp_path / "m.onnx"))
    assert not list(tmp_path.iterdir())


def test_verify(networks, tmp_path):
    prepared, converted = networks
    path = qat.export_onnx(converted, (X,), tmp_path / "m.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"no model")
    refused("no such file", lambda: qat.verify(converted, tmp_path / "none.onnx", [X]))
    refused("no ONNX file", lambda: qat.verify(converted, tmp_path / "junk.onnx", [X]))
    refused("an empty batch", lambda: qat.verify(converted, path, [X[:0]]))
    refused("an empty batch", lambda: verify_integers(converted, [X[:0]]))
    refused("no batches", lambda: verify_trained(prepared, converted, []))
    refused("no batches", lambda: signal_to_noise(prepared, converted, []))
    refused("no activation quantizers", lambda: signal_to_noise(converted, converted, [X]))
    refused("inputs that it takes", lambda: qat.verify(converted, path, [X.double()]))
    other = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), (X,))
    qat.calibrate(other, [X])
    refused("common quantizer", lambda: signal_to_noise(prepared, nn.Identity(), [X]))
    refused("the file written from this network", lambda: qat.verify(qat.convert(other), path, [X]))


def test_fake_quantization_switched_off_is_said(networks):
    prepared, converted = networks
    qat.set_fake_quant(prepared, weights=False)
    try:
        refused("switched off", lambda: verify_trained(prepared, converted, [X]))
    finally:
        qat.set_fake_quant(prepared)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(value):
    prepared = qat.prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)), (X,))
    qat.calibrate(prepared, [X])
    with torch.no_grad():
        prepared.get_submodule("0").weight_fold[0, 0] = value
    refused("0: found NaN or Inf", lambda: qat.convert(prepared))


def test_converted_once_only(networks):
    refused("converted already", lambda: qat.convert(networks[1]))


CONFIGURATIONS = {
    "bits as text": (lambda: qat.QATConfig(overrides={"a": {"weight": {"bits": "8"}}}), "from 2 to 8"),
    "too many bits": (lambda: qat.QATConfig(overrides={"a": {"weight": {"bits": 99}}}), "from 2 to 8"),
    "symmetric as text": (lambda: qat.QuantSpec(symmetric="no"), "true or false"),
    "power_of_two as text": (lambda: qat.QuantSpec(power_of_two="yes"), "true or false"),
    "a number for a grid": (lambda: qat.QATConfig(weight=7), "a QuantSpec"),
    "a dict for a grid": (lambda: qat.QATConfig(activation={"bits": 8}), "a QuantSpec"),
    "no options": (lambda: qat.QATConfig(fold_options=None), "a mapping"),
    "a misspelt key": (lambda: qat.QATConfig.for_target("ort_x86", wight=qat.QuantSpec()), "weight"),
    "a target for a configuration": (lambda: qat.prepare(Residual(), (X,), "ort_x86"), "a QATConfig"),
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations(kind):
    call, expected = CONFIGURATIONS[kind]
    refused(expected, call)


RATIOS = {"zero": (0.0,), "negative": (-1.0,), "none": (), "not a number": (float("nan"),), "above one": (1.0, 2.0)}


@pytest.mark.parametrize("kind", RATIOS)
def test_shares_that_are_none(kind):
    prepared = qat.prepare(randomize(Residual()), (X,), qat.QATConfig(weight_range="lsq"))
    refused("calibrate", lambda: qat.search_weight_ranges(prepared, [X]))
    qat.calibrate(prepared, [X])
    refused("shares of the full range", lambda: qat.search_weight_ranges(prepared, [X], RATIOS[kind]))
    refused("finite outputs", lambda: qat.search_weight_ranges(prepared, [X * float("nan")]))
    assert list(qat.search_weight_ranges(prepared, [X], (r for r in (1.0, 0.5)))) == ["stem.0", "conv1", "conv2", "fc"]
