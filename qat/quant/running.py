"""Ranges over batches: accumulation, start-up and the agreement of several processes, as pure functions without a wait for the device.

An extent is stack(-lo, hi), shape (2,) or (2, C): both ends then grow upwards and one maximum serves both.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def extent(lo: Tensor, hi: Tensor) -> Tensor:
    return torch.stack((lo.neg(), hi))


def joint(new: Tensor) -> Tensor:
    """The extent of all ranks' batches together; non-finite where any rank's is. The tensor itself without a process group."""
    if not ranks():
        return new
    new = torch.where(torch.isfinite(new), new, torch.inf)
    dist.all_reduce(new, op=dist.ReduceOp.MAX)
    return new


def joint_mean(value: Tensor, elements: int) -> Tensor:
    """Mean over all ranks' elements of each rank's mean over its own, the same number on each of them."""
    if not ranks():
        return value
    sums = torch.stack((value * elements, torch.full_like(value, elements)))
    dist.all_reduce(sums)
    return sums[0] / sums[1]


def ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_finite(value: Tensor) -> Tensor:
    """() bool; fewer small kernels than torch.isfinite(value).all()."""
    return (value - value).eq(0).all()


def any_nonfinite(value: Tensor) -> Tensor:
    """() bool."""
    return (value - value).ne(0).any()


def accumulate(state: Tensor, batches: Tensor, new: Tensor, momentum: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Take one batch into the running extent.

    Args:
        state: extent so far; anything when batches is 0.
        batches: () int64, finite batches so far.
        new: this batch's extent; a non-finite one changes nothing.
        momentum: weight of the new batch in the moving average, or None to keep the extremes. The average starts without bias: the n-th
            batch weighs at least 1/n.

    Returns:
        (extent, batches, finite): finite is () bool.
    """
    finite = all_finite(new)
    batches = batches + finite
    if momentum is None:
        taken = torch.where(batches > 1, torch.maximum(state, new), new)
    else:
        # Before the first finite batch the weight is infinite and what it gives is not taken.
        weight = batches.to(state.dtype).reciprocal_().clamp_(min=momentum)
        taken = torch.lerp(state, new.to(state.dtype), weight)
    return torch.where(finite, taken, state), batches, finite
