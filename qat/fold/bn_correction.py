"""bn_correction: quantize with the running statistics, correct the output to those of the batch; freeze later.

Source: [K18] arXiv 1806.08342, eq. 22-31 and fig. 9.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma, exactly so after the freeze.

    before the freeze   y = conv(x, Q(gamma W / sigma)) sigma / sigma_B + beta - gamma mu_B / sigma_B        [eq. 22-27]
    after the freeze    y = conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma                            [eq. 28-31]

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps). mu_B, sigma_B: of this batch, through the **float** layer
(the second convolution), the variance biased; gradients flow through them. The quantized weights do not change with the batch.
"""

from torch import Tensor

from qat.fold.base import FoldedConvBN


class BNCorrection(FoldedConvBN):
    strategy = "bn_correction"

    def training_forward(self, x: Tensor) -> Tensor:
        return self.normalised_forward(x)
