"""Mean and variance of a batch per channel, their running averages and their pooling.

Variances are **biased** (divided by n), as BatchNorm normalises with; running variances are **unbiased** (n / (n - 1) times that), as torch
stores them. Nothing here waits for the device.

Over several processes, and over several batches, variances combine by the law of total variance:
    n = sum n_i        mean = sum n_i mean_i / n        var = sum n_i (var_i + (mean_i - mean)^2) / n
The mean of the var_i alone lacks the variance between the parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from qat.errors import QATError
from qat.fold.arithmetic import at_least_float32
from qat.fold.joint import is_joint, joint_sum

Count = int | Tensor


def batch_statistics(y: Tensor, channel_dim: int = 1, name: str = "", group: Any = None) -> tuple[Tensor, Tensor, Count]:
    """Statistics of one batch, joint over all ranks when a process group runs; differentiable; in float32 at least.

    Args:
        y: any shape; all dimensions but `channel_dim` are averaged over.
        name: qualified layer name, for the error.
        group: process group, None for the default one.

    Returns:
        mean (C), biased variance (C), values per channel: an int in one process, a () tensor over several.

    Raises:
        QATError: one value per channel, which has no variance.
    """
    require_several_values(y, channel_dim, name, group)
    mean, var = _Moments.apply(at_least_float32(y), channel_dim % y.dim())
    count = y.numel() // y.shape[channel_dim]
    return joint_statistics(mean, var, count, group) if is_joint(group) else (mean, var, count)


def joint_statistics(mean: Tensor, var: Tensor, count: int, group: Any = None) -> tuple[Tensor, Tensor, Tensor]:
    """Each rank's mean, variance and count -> those of the joint batch."""
    sums = joint_sum(torch.cat((mean * count, mean.new_full((1,), count))), group)
    total = sums[-1].detach()
    joint_mean = sums[:-1] / total
    return joint_mean, joint_sum((var + (mean - joint_mean).square()) * count, group) / total, total


def require_several_values(y: Tensor, channel_dim: int = 1, name: str = "", group: Any = None) -> None:
    """Raises QATError for a batch that BatchNorm cannot normalise."""
    if y.numel() // max(y.shape[channel_dim], 1) < 2 and not is_joint(group):
        raise QATError(
            name or "BatchNorm",
            f"a layer output of shape {tuple(y.shape)}",
            "more than 1 value per channel when training",
            "Use a larger batch, drop the last partial batch, or freeze the BatchNorm.",
        )


@torch.no_grad()
def move_running(bn: nn.Module, mean: Tensor, var: Tensor, count: Count) -> None:
    """Take one batch into running_mean, running_var and num_batches_tracked as torch's BatchNorm does.

    Args:
        var: biased; stored unbiased.
    """
    running_mean, running_var, seen = bn.running_mean, bn.running_var, bn.num_batches_tracked
    assert isinstance(running_mean, Tensor) and isinstance(running_var, Tensor)
    weight: float | Tensor | None = bn.momentum  # type: ignore[assignment]
    if isinstance(seen, Tensor):
        seen.add_(1)
        if weight is None:
            weight = seen.to(running_mean.dtype).reciprocal()
    running_mean.lerp_(mean.to(running_mean.dtype), 0.0 if weight is None else weight)
    running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), 0.0 if weight is None else weight)


def held(statistic: Tensor) -> Tensor:
    """A running statistic as it is before this step's update, also for a compiled backward pass.

    torch.compile would rather keep the buffer than what was computed from it, and compute that once more in the backward pass, when the
    buffer has moved. What a custom operator gives is kept.
    """
    return _held(statistic) if torch.compiler.is_compiling() else statistic


@torch.library.custom_op("qat::held", mutates_args=())
def _held(statistic: Tensor) -> Tensor:
    return statistic.clone()


_held.register_fake(torch.empty_like)


class Pool:
    """Pooled statistics of several batches: those of the batches laid end to end, up to float64 rounding."""

    def __init__(self) -> None:
        self.count: Tensor | None = None

    def add(self, mean: Tensor, var: Tensor, count: Count) -> None:
        """Take one batch: mean (C), biased variance (C), values per channel."""
        # MPS has no float64.
        wide = torch.float32 if mean.device.type == "mps" else torch.float64
        mean, var = mean.detach().to(wide), var.detach().to(wide)
        n = count.detach().to(wide) if isinstance(count, Tensor) else mean.new_full((), count)
        if self.count is None:
            self.count, self.mean, self.spread = n, mean, var * n
            return
        delta, total = mean - self.mean, self.count + n
        self.mean = self.mean + delta * (n / total)
        self.spread = self.spread + var * n + delta.square() * (self.count * n / total)
        self.count = total

    def result(self) -> tuple[Tensor, Tensor]:
        """(mean, unbiased variance), each (C). Raises QATError when no batch was added."""
        if self.count is None:
            raise QATError("Pool", "no batch", "at least one", "Run training batches between start_pooling and finish_pooling.")
        return self.mean, self.spread / (self.count - 1)


@torch.no_grad()
def write_pooled(pool: Pool | None, bn: Any) -> None:
    """Set the running mean and (unbiased) variance of `bn` to the pooled ones, unless no batch came."""
    if pool is not None and pool.count is not None:
        mean, var_unbiased = pool.result()
        bn.running_mean.copy_(mean)
        bn.running_var.copy_(var_unbiased)


class _Moments(Function):
    """Mean and biased variance in two passes, with a gradient that reads y once: dy = (g_mean + 2 g_var (y - mean)) / n."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        dims = [d for d in range(y.dim()) if d != channel_dim]
        ctx.view = [1] * y.dim()
        ctx.view[channel_dim] = -1
        ctx.n = y.numel() // y.shape[channel_dim]
        if y.is_cuda:
            var, mean = torch.var_mean(y, dims, correction=0)
        else:
            # torch.var_mean takes 7 times as long on a CPU.
            mean = y.mean(dims)
            var = (y - mean.view(ctx.view)).square_().mean(dims)
        ctx.save_for_backward(y, mean)
        return mean, var

    @staticmethod
    def backward(ctx: Any, g_mean: Tensor, g_var: Tensor) -> tuple[Tensor, None]:
        y, mean = ctx.saved_tensors
        centred = y - mean.view(ctx.view)
        scale, shift = (g_var * (2 / ctx.n)).view(ctx.view), (g_mean / ctx.n).view(ctx.view)
        return torch.addcmul(shift, centred, scale, out=None if torch.is_grad_enabled() else centred), None
