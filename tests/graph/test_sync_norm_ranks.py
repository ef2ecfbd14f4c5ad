"""A network whose BatchNorms are synchronised, prepared and trained by two processes, is that of one process with the joint batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from small_networks import Residual, randomize
from torch import nn

import qat


def joint_batch(seed):
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def networks():
    for strategy in qat.STRATEGIES:
        torch.manual_seed(0)
        network = nn.SyncBatchNorm.convert_sync_batchnorm(randomize(Residual()).double().train())
        prepared = qat.prepare(network, (joint_batch(0),), qat.QATConfig(fold=strategy))
        qat.calibrate(prepared, [joint_batch(0)])
        yield strategy, prepared.train()


def step(network, x, reduce):
    """One step of SGD on the sum over the joint batch."""
    network(x).square().sum().backward()
    with torch.no_grad():
        for p in network.parameters():
            reduce(p.grad)
            p -= 1e-4 * p.grad
            p.grad = None


def _rank(rank, store):
    torch.set_num_threads(1)
    pairs = [(strategy, network, copy.deepcopy(network)) for strategy, network in networks()]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _, network, _ in pairs:
        for seed in (1, 2):
            step(network, joint_batch(seed).split((3, 5))[rank], dist.all_reduce)
    dist.destroy_process_group()
    for strategy, network, single in pairs:
        for seed in (1, 2):
            step(single, joint_batch(seed), lambda gradient: None)
        for name, value in single.state_dict().items():
            torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-7, atol=1e-9, msg=f"{strategy} {name}")


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=2)
