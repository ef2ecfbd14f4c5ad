"""Pooled statistics as a step that leaves its argument alone."""

import torch
from chains import pictures, separable

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
    assert [name for name, _ in report.done] == ["0", "3", "6", "9"] and report.left == [("14", "its BatchNorm is gone")]
    assert report.done[0][1].startswith(f"mean moved by up to {moved:.3g} sigma")
