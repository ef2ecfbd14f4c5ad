"""Two processes hold the ranges that one process has with the joint batch."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from qat.quant import FakeQuantizer, QuantSpec

SPEC = QuantSpec(4, False, False)
KINDS = [("ema", SPEC), ("minmax", SPEC), ("lsq", SPEC), ("ema", QuantSpec(4))]


def batches():
    made = [torch.randn(8, 3, generator=torch.Generator().manual_seed(i)) * (i + 1) for i in range(3)]
    made[1][6, 0] = float("nan")  # in the second rank's half
    return made


def run(pick):
    quantizers = [FakeQuantizer(spec, name, running=True, axis=1) for name, spec in KINDS]
    for batch in batches():
        for quantizer in quantizers:
            quantizer(pick(batch))
    return [(q.scale.detach(), q.zero_point.detach(), q.nonfinite_batches) for q in quantizers]


def rank_main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.save(run(lambda batch: batch[4 * rank : 4 * rank + 4]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one_with_the_joint_batch(tmp_path):
    mp.spawn(rank_main, (str(tmp_path),), nprocs=2)
    expected = run(lambda batch: batch)
    for rank in range(2):
        for (name, _), ours, joint in zip(KINDS, torch.load(tmp_path / f"{rank}.pt", weights_only=True), expected):
            for a, b in zip(ours, joint):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=f"{name} on rank {rank}")
