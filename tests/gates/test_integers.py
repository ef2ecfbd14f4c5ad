"""Gate: the trained network in evaluation, convert() and integers alone give the same integers at every tensor."""

import pytest
import torch
from gate_network import images, prepared_network, settings, train

import qat
from qat.deploy.reference import IntegerReference
from qat.deploy.verify import verify_integers, verify_trained
from qat.graph.lifecycle import activation_quantizers

X = images(99, 160)


def trained_codes(prepared):
    """Integers of every activation tensor in the trained network's own evaluation."""
    codes, handles = {}, []
    for name, quantizer in activation_quantizers(prepared).items():
        handles.append(quantizer.register_forward_hook(lambda m, i, o, name=name: codes.__setitem__(name, m.codes(i[0]))))
    with torch.no_grad():
        prepared(X)
    for handle in handles:
        handle.remove()
    return codes


@pytest.mark.filterwarnings("ignore:.*rounds all weights of channels")
@pytest.mark.parametrize(("strategy", "grid", "weight_range"), settings())
def test_evaluation_is_the_integer_reference(strategy, grid, weight_range):
    """Each tensor from the integers before it: a sum half-way between two codes goes either way in float32, and grows behind."""
    prepared = prepared_network(strategy, grid, weight_range)
    train(prepared, 3)
    qat.freeze_bn(prepared)
    train(prepared, 2, first=3)
    prepared.eval()
    converted = qat.convert(prepared)
    trained = trained_codes(prepared)
    reference = IntegerReference(converted, "fixed")
    stepwise = reference.run_codes(X, given=trained)
    assert trained.keys() == stepwise.keys() and len(trained) == 8 and reference.float_nodes == []
    for name, codes in trained.items():
        difference = (codes - stepwise[name]).abs()
        assert difference.max() <= 1 and (difference == 0).float().mean() >= 0.999, name
        assert codes.unique().numel() > 3, f"{name} says little"
    for report in (verify_trained(prepared, converted, [X], stepwise=True), verify_integers(converted, [X], stepwise=True)):
        assert report.max_lsb <= 1 and all(row.identical >= 0.999 for row in report.tensors), str(report)
    assert verify_trained(prepared, converted, [X]).identical >= 0.999 and verify_integers(converted, [X]).identical >= 0.999
