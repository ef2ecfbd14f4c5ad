"""Sums over the processes of a distributed job, with a gradient."""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def is_joint(group: Any = None) -> bool:
    """Whether a process group with more than one member runs."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def joint_sum(value: Tensor, group: Any = None) -> Tensor:
    """Sum over ranks, the same on each. The gradient is summed too, as every rank's loss depends on every rank's value."""
    return _JointSum.apply(value, group)


class _JointSum(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return joint_sum(grad.contiguous(), ctx.group), None
