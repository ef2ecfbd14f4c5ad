"""What a training step may cost: no wait for the device, no observer once ranges rest, one convolution a layer where one is enough."""

import pytest
import torch
from small_networks import Residual, randomize

import qat

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
CONVOLUTIONS = 3
TWICE = ("naive", "batch_renorm", "bn_correction")


def prepared_network(strategy, **options):
    prepared = qat.prepare(randomize(Residual()), (X,), qat.QATConfig(fold=strategy, **options))
    qat.calibrate(prepared, [X])
    return prepared.train()


def operators(network, x=X):
    """Calls of each operator in a training step."""
    network(x).square().mean().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        network(x).square().mean().backward()
    return {event.key: event.count for event in profile.key_averages()}


@pytest.mark.parametrize("range", ["minmax", "lsq"])
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_step_never_reads_the_device(strategy, range):
    options = {"weight_range": range, "activation_range": "lsq" if range == "lsq" else "ema"}
    network = prepared_network(strategy, **options)
    assert "aten::_local_scalar_dense" not in operators(network)
    qat.freeze_bn(network)
    qat.freeze_ranges(network)
    assert "aten::_local_scalar_dense" not in operators(network)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_step_never_waits_for_the_gpu(strategy):
    network, x = prepared_network(strategy).cuda(), X.cuda()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for frozen in (False, True):
        if frozen:
            qat.freeze_bn(network)
            qat.freeze_ranges(network)
        network(x).square().mean().backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            network(x).square().mean().backward()
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_frozen_ranges_cost_no_observer(strategy):
    network = prepared_network(strategy)
    watched = {"aten::aminmax", "aten::amin", "aten::amax"}
    assert watched & operators(network).keys()
    qat.freeze_ranges(network)
    assert not watched & operators(network).keys()


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_how_many_convolutions_a_step_takes(strategy):
    """Forward and for the weight; the second of a double strategy shares the weight's gradient."""
    network = prepared_network(strategy)
    before = operators(network)
    forward = CONVOLUTIONS * (2 if strategy in TWICE or strategy == "moving_average" else 1)
    assert before["aten::convolution"] == forward
    qat.freeze_bn(network)
    after = operators(network)
    assert after["aten::convolution"] == after["aten::convolution_backward"] == CONVOLUTIONS


def test_the_averages_of_a_quantized_layer_take_one_convolution():
    assert operators(prepared_network("moving_average", fold_options={"statistics": "quantized"}))["aten::convolution"] == CONVOLUTIONS
