"""Randomness that belongs to one sample of one epoch, whoever computes it.

A picture's augmentation is a function of (seed, epoch, index): the same in any worker, on any rank, and after a resume.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood 2014): neighbouring integers become unrelated ones."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed in [0, 2^32): the CPU generator of torch reads no more bits than these."""
    return _mix(_mix(_mix(seed) ^ epoch) ^ index) >> 32


def permutation(samples: int, seed: int, epoch: int) -> Tensor:
    """The order (samples,) in which an epoch visits the samples."""
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch, _MASK))
    return torch.randperm(samples, generator=generator)


@contextmanager
def sample_rng(seed: int, epoch: int, index: int) -> Iterator[None]:
    """Inside, torch's CPU random numbers are those of this sample; afterwards they go on as if nothing had been drawn.

    Only the CPU generator is seeded: `torch.manual_seed` would also restart the generators of the accelerators.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sample_seed(seed, epoch, index))
        yield
