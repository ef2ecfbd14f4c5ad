"""Which samples a rank sees, and in which order.

Both samplers shard the data themselves, by the rank and world size of torch.distributed at the time they are built. They
derive from torch's `DistributedSampler` because Lightning leaves loaders with such a sampler alone: its own replacement would
wrap the sampler, shuffle the shards a second time and repeat samples so that all shards are equally long.
"""

from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from qat.errors import ConfigError
from qat.train.data.sample_seed import permutation


def _world(samples: int) -> dict[str, int]:
    """Keyword arguments of `DistributedSampler` for this process."""
    running = dist.is_available() and dist.is_initialized()
    replicas, rank = (dist.get_world_size(), dist.get_rank()) if running else (1, 0)
    if samples < replicas:
        raise ConfigError("data", f"a split of {samples} pictures", f"at least one for each of {replicas} ranks", "Lower trainer.devices.")
    return {"num_replicas": replicas, "rank": rank}


class TrainSampler(DistributedSampler):
    """Yields (epoch, index) in the order `permutation(samples, seed, epoch)`.

    Rank r of w takes every w-th sample from the r-th on: shards are disjoint and equally long; up to w - 1 samples, other
    ones in each epoch, are left out.

    Attributes:
        epoch: set through `set_epoch`, which Lightning calls before every epoch.
        start: samples of this rank to leave out at the beginning of the next iteration; `len` still counts them.
    """

    def __init__(self, samples: int, seed: int):
        super().__init__(range(samples), shuffle=True, seed=seed, drop_last=True, **_world(samples))  # type: ignore[arg-type]
        self.samples = samples
        self.start = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        shard = permutation(self.samples, self.seed, self.epoch)[self.rank : self.total_size : self.num_replicas]
        epoch = self.epoch
        return ((epoch, index) for index in shard[self.start :].tolist())


class EvalSampler(DistributedSampler):
    """Yields (0, index) in the stored order, each sample on exactly one rank; shards differ by one sample at most."""

    def __init__(self, samples: int):
        super().__init__(range(samples), shuffle=False, **_world(samples))  # type: ignore[arg-type]
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((0, index) for index in range(self.rank, self.samples, self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, self.samples, self.num_replicas))

    def even_batch_size(self, batch_size: int) -> int:
        """The smallest batch size >= `batch_size` that gives every rank the same number of batches.

        Ranks exchange buffers before each forward of DistributedDataParallel, so one batch more on one rank would wait for ever.
        Counts differ only when the shorter shard fills its batches exactly.
        """
        shorter, longer = self.samples // self.num_replicas, -(-self.samples // self.num_replicas)
        while shorter != longer and shorter % batch_size == 0:
            batch_size += 1
        return batch_size
