"""naive: fold with the statistics of the batch.

Source: [K18] arXiv 1806.08342, fig. 8; [MQ] arXiv 2111.03759, strategy 2.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma.

    y = conv(x, Q(gamma W / sigma_B)) + beta - gamma mu_B / sigma_B

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps). mu_B, sigma_B: of this batch, through the float layer (the
first convolution), the variance biased; gradients flow through them. The quantized weights jitter with every batch, unless the scale of
each channel follows its weights.
"""

from torch import Tensor

from qat.fold.arithmetic import fold_bias, fold_weight, native, out_first, sigma
from qat.fold.base import FoldedConvBN
from qat.fold.convolution import convolve


def fold_with_batch(
    weight: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, mu_B: Tensor, sigma_B: Tensor
) -> tuple[Tensor, Tensor]:
    """(gamma W / sigma_B, beta - gamma (mu_B - b) / sigma_B); weight out-first, mu_B with the layer's bias."""
    return fold_weight(weight, gamma, sigma_B), fold_bias(bias, gamma, beta, mu_B, sigma_B)


class Naive(FoldedConvBN):
    strategy = "naive"

    def training_forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        mu_B, var_B, count = self.statistics(x)
        weight, bias = fold_with_batch(out_first(conv.weight, conv), conv.bias, self.gamma, self.beta, mu_B, sigma(var_B, self.bn.eps))
        y = convolve(conv, x, native(self._quantize(weight), conv), bias)
        self.record(mu_B, var_B, count)
        return self.activation(y)
