"""Gate: from the freeze step on the training forward is the evaluation forward, bit by bit."""

import copy

import pytest
import torch
from gate_network import images, prepared_network, settings, train

import qat
from qat.fold import FoldedConvBN

X = images(99, 8)


def every_tensor(network):
    """What each folded layer and each quantizer gives, in order, and the network's output last."""
    seen, handles = [], []
    for name, module in network.named_modules():
        if isinstance(module, (FoldedConvBN, qat.FakeQuantizer)):
            handles.append(module.register_forward_hook(lambda m, i, o, name=name: seen.append((name, o.detach().clone()))))
    seen.append(("output", network(X).detach()))
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(("strategy", "grid", "weight_range"), settings())
def test_training_is_evaluation_from_the_freeze_on(strategy, grid, weight_range):
    prepared = prepared_network(strategy, grid, weight_range)
    train(prepared, 2)
    qat.freeze_bn(prepared)
    qat.freeze_ranges(prepared, weights=False)
    for step in range(2):
        trained = every_tensor(prepared.train())
        evaluated = every_tensor(copy.deepcopy(prepared).eval())
        assert len(trained) > 13 and [name for name, _ in trained] == [name for name, _ in evaluated]
        for (name, ours), (_, theirs) in zip(trained, evaluated):
            assert torch.equal(ours, theirs), f"{name} at step {step} after the freeze"
        train(prepared, 1, first=2 + step)
