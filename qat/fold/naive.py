"""naive: fold with the statistics of the batch.

Source: [K18] arXiv 1806.08342, fig. 8; [MQ] arXiv 2111.03759, strategy 2.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma.

    y = conv(x, Q(gamma W / sigma_B)) + beta - gamma mu_B / sigma_B

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps). mu_B, sigma_B: of this batch, through the float layer (the
first convolution), the variance biased; gradients flow through them. The quantized weights jitter with every batch, unless the scale of
each channel follows its weights.
"""

import torch
from torch import Tensor

from qat.fold.arithmetic import fold_bias, sigma
from qat.fold.base import FoldedConvBN
from qat.fold.two_passes import TwoPasses


class Naive(FoldedConvBN):
    strategy = "naive"

    def training_forward(self, x: Tensor) -> Tensor:
        passes = TwoPasses(self, x)
        mu_B, var_B, count = passes.statistics()
        sigma_B = sigma(var_B, self.bn.eps)
        y = passes.quantized(self.gamma, sigma_B, fold_bias(self.conv.bias, self.gamma, self.beta, mu_B, sigma_B))
        self.record(mu_B, var_B, count)
        return self.activation(y)

    @torch.no_grad()
    def quantized_under(self, running: Tensor) -> Tensor:
        return running if self.frozen else sigma(self.batch_var, self.bn.eps)
