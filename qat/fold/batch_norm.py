"""BatchNorm of a batch that gives its statistics away: for the strategies that normalise the quantized layer's own output."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from qat.fold.arithmetic import at_least_float32, fold_bias, scale_shift, sigma
from qat.fold.base import FoldedConvBN
from qat.fold.joint import is_joint
from qat.fold.statistics import Count, batch_statistics, require_several_values


def normalise(
    u: Tensor, gamma: Tensor, beta: Tensor, eps: float, name: str = "", group: Any = None
) -> tuple[Tensor, Tensor, Tensor, Count]:
    """gamma (u - mu_u) / sigma_u + beta over all ranks' batches; gradients flow through mu_u and sigma_u.

    Args:
        u: (N, C, *).

    Returns:
        the result in the type of u, and the mean, biased variance and count of `batch_statistics`; in one process these have no gradient.

    Raises:
        QATError: one value per channel.
    """
    if is_joint(group):
        mean, var, count = batch_statistics(u, name=name, group=group)
        scale = sigma(var, eps)
        return scale_shift(u, gamma / scale, fold_bias(None, gamma, beta, mean, scale)), mean, var, count
    require_several_values(u, name=name)
    # Momentum 1 makes torch's kernel hand out the batch's own mean and unbiased variance, without another pass over u.
    gamma, beta = at_least_float32(gamma), at_least_float32(beta)
    mean, var = gamma.new_zeros((2, gamma.numel())).unbind()
    y = F.batch_norm(u, mean, var, gamma, beta, True, 1.0, eps)
    n = u.numel() // u.shape[1]
    return y, mean, var * ((n - 1) / n), n


class OutputNormalised(FoldedConvBN):
    """A strategy that normalises its own quantized output: the batch's statistics are those of the quantized layer."""

    def unnormalised(self, x: Tensor) -> Tensor:
        """Output of the quantized layer on the scale of the float layer's, (N, C_out, *)."""
        raise NotImplementedError

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Count]:
        return batch_statistics(self.unnormalised(x), name=self.name, group=self.group)

    def training_forward(self, x: Tensor) -> Tensor:
        return self.normalised_forward(x)

    def normalised_forward(self, x: Tensor) -> Tensor:
        y, mean, var, count = normalise(self.unnormalised(x), self.gamma, self.beta, self.bn.eps, self.name, self.group)
        self.record(mean, var, count)
        return self.activation(y)
