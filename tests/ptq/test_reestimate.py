"""Pooled statistics as a step that leaves its argument alone."""

import pytest
import torch
from chains import pictures, separable
from torch import nn

import qat


def test_a_copy_has_the_statistics_of_all_batches_and_the_argument_its_own():
    x = pictures()
    prepared = qat.prepare(separable(), (x,))
    qat.calibrate(prepared, [x])
    before = {key: value.clone() for key, value in prepared.state_dict().items()}
    changed = qat.ptq.reestimate_bn(prepared, [x, 2 * x + 1])
    assert all(torch.equal(value, before[key]) for key, value in prepared.state_dict().items())
    qat.reestimate_bn(prepared, [x, 2 * x + 1])
    assert all(torch.equal(value, changed.state_dict()[key]) for key, value in prepared.state_dict().items())
    assert not torch.equal(changed.get_submodule("0").bn.running_mean, before["0.bn.running_mean"])


def test_the_report_says_how_far_statistics_moved_and_which_are_gone():
    x = pictures()
    prepared = qat.prepare(separable(), (x,))
    qat.calibrate(prepared, [x])
    report = qat.ptq.reestimate_bn(prepared, [x]).step_reports[-1]
    layer, old = qat.ptq.reestimate_bn(prepared, [x]).get_submodule("0"), prepared.get_submodule("0")
    moved = float(((layer.bn.running_mean - old.bn.running_mean).abs() / old.sigma).max())
    assert [name for name, _ in report.done] == ["0", "3", "6", "9"] and report.left == [("14", "it has no BatchNorm")]
    assert report.done[0][1].startswith(f"mean moved by up to {moved:.3g} sigma")


def test_a_bias_correction_is_taken_out_first_and_a_float_network_refused():
    x = pictures()
    prepared = qat.prepare(separable(), (x,), qat.QATConfig(fold="single_pass", weight=qat.QuantSpec(bits=3)))
    qat.calibrate(prepared, [x])
    corrected = qat.ptq.correct_bias(prepared, [x])
    wanted, got = (qat.ptq.reestimate_bn(network, [x]) for network in (prepared, corrected))
    with torch.no_grad():
        assert torch.equal(got(x), wanted(x)) and not torch.equal(corrected(x), prepared(x))
    with pytest.raises(qat.QATError, match=r"reestimate_bn: found a Sequential"):
        qat.ptq.reestimate_bn(separable(), [x])


def test_static_layers_and_norms_left_in_place_are_told():
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    for strategy, done, left in (
        ("bn_correction", ["1", "0"], []),
        ("static", ["0"], [("1", "its BatchNorm is gone")]),
    ):
        prepared = qat.prepare(network, (pictures(),), qat.QATConfig(fold=strategy))
        qat.calibrate(prepared, [pictures()])
        report = qat.ptq.reestimate_bn(prepared, [pictures()]).step_reports[-1]
        assert ([name for name, _ in report.done], report.left) == (done, left)


@pytest.mark.parametrize("strategy", [name for name in qat.STRATEGIES if name != "static"])
def test_a_batch_of_nan_leaves_the_statistics_and_is_named(strategy):
    x = pictures()
    prepared = qat.prepare(separable(), (x,), qat.QATConfig(fold=strategy))
    qat.calibrate(prepared, [x])
    before = {key: value.clone() for key, value in prepared.state_dict().items()}
    for step in (qat.reestimate_bn, qat.ptq.reestimate_bn):
        with pytest.raises(qat.QATError, match="0: found statistics with NaN or Inf on these batches"):
            step(prepared, [x, x * torch.nan])
    assert all(torch.equal(value, before[key]) for key, value in prepared.state_dict().items())
