"""bn_correction: quantize with the running statistics, correct the output to those of the batch; freeze later.

Source: [K18] arXiv 1806.08342, eq. 22-31 and fig. 9.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma, exactly so after the freeze.

    before the freeze   y = conv(x, Q(gamma W / sigma)) sigma / sigma_B + beta - gamma mu_B / sigma_B        [eq. 22-27]
    after the freeze    y = conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma                            [eq. 28-31]

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps). mu_B, sigma_B: of this batch, through the **float** layer
(the second convolution), the variance biased; gradients flow through them. The quantized weights do not change with the batch.
"""

from torch import Tensor

from qat.fold.arithmetic import fold_bias, native, scale_shift, sigma
from qat.fold.base import FoldedConvBN
from qat.fold.convolution import convolve


def corrected(u: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, mu_B: Tensor, sigma_B: Tensor, sigma: Tensor) -> Tensor:
    """Eq. 22-27.

    Args:
        u: conv(x, Q(gamma W / sigma)), (N, C_out, *).
        bias: the layer's own b, which mu_B contains and which cancels.
    """
    return scale_shift(u, sigma / sigma_B, fold_bias(bias, gamma, beta, mu_B, sigma_B))


class BNCorrection(FoldedConvBN):
    strategy = "bn_correction"

    def training_forward(self, x: Tensor) -> Tensor:
        mu_B, var_B, count = self.statistics(x)
        u = convolve(self.conv, x, native(self._quantize(self.weight_to_quantize()), self.conv), None)
        y = corrected(u, self.conv.bias, self.gamma, self.beta, mu_B, sigma(var_B, self.bn.eps), self.sigma)
        self.record(mu_B, var_B, count)
        return self.activation(y)
