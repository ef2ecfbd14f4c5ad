"""batch_renorm: fold with the statistics of the batch, corrected towards the running ones.

Source: Ioffe, Batch Renormalization, arXiv 1702.03275, algorithm 1; the baseline of [K18] arXiv 1806.08342, fig. 14.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma.

    r = clip(sigma_B / sigma, 1 / r_max, r_max)        d = clip((mu_B - mu) / sigma, -d_max, d_max)        both without gradient
    y = conv(x, Q(gamma r W / sigma_B)) + beta - gamma r mu_B / sigma_B + gamma d

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps) before this batch's update. mu_B, sigma_B: of this batch,
through the float layer, the variance biased; gradients flow through them. Inside the clips the values are those of the inference graph
and only the gradient is that of the batch; with r_max = 1 and d_max = 0 this is `naive`."""

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.fold.arithmetic import at_least_float32, fold_bias
from qat.fold.arithmetic import sigma as sigma_of
from qat.fold.base import FoldedConvBN
from qat.fold.statistics import held
from qat.fold.two_passes import TwoPasses


@torch.no_grad()
def correction(mu_B: Tensor, sigma_B: Tensor, mu: Tensor, sigma: Tensor, r_max: float, d_max: float) -> tuple[Tensor, Tensor]:
    """(r, d), (C_out) each, constants for the gradient."""
    return (sigma_B / sigma).clamp(1 / r_max, r_max), ((mu_B - mu) / sigma).clamp(-d_max, d_max)


class BatchRenorm(FoldedConvBN):
    """Args: r_max (at least 1) and d_max (at least 0) bound the correction; the defaults are the paper's for late training.

    Raises:
        QATError: a bound out of range.
    """

    strategy = "batch_renorm"

    def __init__(
        self, conv: nn.Module, bn: nn.Module, weight_quantizer: nn.Module | None = None, *, r_max: float = 3.0, d_max: float = 5.0
    ):
        super().__init__(conv, bn, weight_quantizer)
        if r_max < 1 or d_max < 0:
            raise QATError("batch_renorm", f"r_max={r_max}, d_max={d_max}", "r_max >= 1 and d_max >= 0", "The paper uses 3 and 5.")
        self.r_max, self.d_max = r_max, d_max

    def training_forward(self, x: Tensor) -> Tensor:
        gamma, passes = at_least_float32(self.gamma), TwoPasses(self, x)
        mu_B, var_B, count = passes.statistics()
        sigma_B = sigma_of(var_B, self.bn.eps)
        r, d = correction(mu_B, sigma_B, held(self.bn.running_mean), self.sigma, self.r_max, self.d_max)
        bias = fold_bias(self.conv.bias, gamma * r, self.beta, mu_B, sigma_B) + gamma * d
        y = passes.quantized(gamma * r, sigma_B, bias)
        self.record(mu_B, var_B, count)
        return self.activation(y)

    @torch.no_grad()
    def quantized_under(self, running: Tensor) -> Tensor:
        if self.frozen:
            return running
        # The means do not reach the weights.
        sigma_B, mean = sigma_of(self.batch_var, self.bn.eps), self.batch_mean
        return sigma_B / correction(mean, sigma_B, mean, running, self.r_max, self.d_max)[0]
