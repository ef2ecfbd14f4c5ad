"""Batch statistics, their running averages and their pooling."""

import pytest
import torch
from fold_cases import assert_close
from torch import nn

from qat.errors import QATError
from qat.fold.statistics import Pool, batch_statistics, move_running


@pytest.mark.parametrize("shape, channel_dim", [((5, 3), 1), ((4, 3, 2), 1), ((2, 3, 4, 5), 1), ((2, 4, 5, 3), -1), ((3, 4, 2), 0)])
def test_values_and_gradients(shape, channel_dim):
    y = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    mean, var, count = batch_statistics(y, channel_dim)
    rows = y.movedim(channel_dim, 0).flatten(1)
    assert count == rows.shape[1]
    assert_close(mean, rows.mean(1), "mean")
    assert_close(var, rows.var(1, correction=0), "variance")
    assert torch.autograd.gradcheck(lambda t: batch_statistics(t, channel_dim)[:2], (y,))


def test_large_mean_does_not_swallow_the_variance():
    y = torch.randn(64, 2, 8, 8) + 1000
    _, var, _ = batch_statistics(y)
    assert_close(var, y.double().transpose(0, 1).flatten(1).var(1, correction=0).float(), "variance", 1e-4)


def test_half_output_is_measured_in_float32():
    mean, var, _ = batch_statistics(torch.randn(8, 2, 4, 4).bfloat16())
    assert mean.dtype == var.dtype == torch.float32


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_one_value_a_channel_names_the_layer(shape):
    with pytest.raises(QATError, match=r"block\.conv: .*more than 1 value per channel when training"):
        batch_statistics(torch.zeros(shape), name="block.conv")


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_averages_are_torchs(momentum):
    ours, theirs = (nn.BatchNorm2d(3, momentum=momentum).double() for _ in range(2))
    for seed in range(4):
        torch.manual_seed(seed)
        y = torch.randn(4, 3, 2, 2, dtype=torch.float64) * 2 + 1
        theirs(y)
        move_running(ours, *batch_statistics(y))
    for key, value in theirs.state_dict().items():
        assert_close(ours.state_dict()[key], value, key, 1e-12)


def test_pool_is_the_batches_laid_end_to_end():
    torch.manual_seed(0)
    batches = [torch.randn(n, 3, 4, dtype=torch.float64) * (n + 1) + n for n in (2, 5, 1, 8)]
    pool = Pool()
    for y in batches:
        pool.add(*batch_statistics(y))
    together = torch.cat(batches).transpose(0, 1).flatten(1)
    mean, var = pool.result()
    assert_close(mean, together.mean(1), "mean", 1e-12)
    assert_close(var, together.var(1), "variance", 1e-12)
    averaged = torch.stack([y.transpose(0, 1).flatten(1).var(1) for y in batches]).mean(0)
    assert bool((averaged < 0.8 * var).all())


def test_pool_takes_counts_as_tensors_and_refuses_to_be_empty():
    y = torch.randn(6, 2, dtype=torch.float64)
    mean, var, count = batch_statistics(y)
    plain, tensors = Pool(), Pool()
    plain.add(mean, var, count)
    tensors.add(mean, var, torch.tensor(float(count)))
    for a, b in zip(plain.result(), tensors.result()):
        assert torch.equal(a, b)
    with pytest.raises(QATError, match="no batch"):
        Pool().result()
