"""Two processes give the statistics and gradients of one process with the joint batch, for every strategy."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fold_cases import BATCH_STRATEGIES, assert_close, batch, pair, quantizer
from fold_reference import Quant

from qat.fold import STRATEGIES

KIND = "conv2d_grouped"
SPLIT = (1, 2)


def layers():
    for strategy in BATCH_STRATEGIES:
        for quant in (Quant(), Quant(4, True)):
            yield f"{strategy} {quant}", STRATEGIES[strategy](*pair(KIND, bias=True, gamma="negative"), quantizer(quant))


def weights(rank):
    return torch.linspace(-1, 1, 3 * 6 * 9, dtype=torch.float64).sin().view(3, 6, 3, 3).split(SPLIT)[rank]


def _rank(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        singles = []
        for name, layer in layers():
            single = copy.deepcopy(layer)
            x = batch(KIND, 0).detach().split(SPLIT)[rank].clone().requires_grad_()
            y = layer(x)
            (y * weights(rank)).sum().backward()
            for p in layer.parameters():
                dist.all_reduce(p.grad)
            layer.start_pooling()
            layer(x)
            layer.finish_pooling()
            singles.append((name, single, layer, y.detach(), x.grad))
        # One rank of its own ends the joint statistics without ending the processes.
        dist.destroy_process_group()
        for name, single, layer, y, x_grad in singles:
            joint = batch(KIND, 0)
            expected = single(joint)
            (expected * torch.cat([weights(0), weights(1)])).sum().backward()
            assert_close(y, expected.split(SPLIT)[rank].detach(), f"{name} output", 1e-9)
            assert_close(x_grad, joint.grad.split(SPLIT)[rank], f"{name} x", 1e-9)
            for (key, p), q in zip(single.named_parameters(), layer.parameters()):
                assert_close(q.grad, p.grad, f"{name} {key}", 1e-9)
            single.start_pooling()
            single(joint)
            single.finish_pooling()
            assert_close(layer.bn.running_mean, single.bn.running_mean, f"{name} mean", 1e-9)
            assert_close(layer.bn.running_var, single.bn.running_var, f"{name} variance", 1e-9)
            assert int(layer.bn.num_batches_tracked) == 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_two_ranks_equal_the_joint_batch(tmp_path):
    mp.spawn(_rank, args=(str(tmp_path / "store"),), nprocs=2)
