"""single_pass: one convolution with the quantized weights, then BatchNorm in batch mode on its output.

Source: [MQ] arXiv 2111.03759, strategy 4; the default conv-BN of PyTorch's eager QAT.
Integer graph simulated: conv(x, Q(gamma W / sigma)) + beta - gamma mu / sigma.

    s = gamma / sigma        What_k = Q(s W)_k / s_k where s_k != 0, W_k where s_k = 0
    u = conv(x, What)        y = gamma (u - mu_u) / sigma_u + beta

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps) before this batch's update; what updates them is mu_u and
var_u, the statistics of the **quantized** layer, so that one convolution is enough. With few bits they differ from the float layer's.
Dividing the weights is dividing the output by s, and costs less. A channel with gamma = 0 gives beta whatever its weights are; with its
float weights gamma has the gradient that it has in the float model."""

import torch
from torch import Tensor

from qat.fold.arithmetic import at_least_float32, divisors, native, out_first, per_row, scale_rows
from qat.fold.batch_norm import OutputNormalised
from qat.fold.convolution import convolve
from qat.fold.straight_through import RescaledLayer, RescaledWeight


def rescaled(weight: Tensor, quantized: Tensor, s: Tensor) -> Tensor:
    """What from W and Q(s W), both out-first; s (C_out)."""
    dead, safe = divisors(s)
    return torch.where(per_row(dead, weight), weight, quantized / per_row(safe, weight))


class SinglePass(OutputNormalised):
    strategy = "single_pass"

    def unnormalised(self, x: Tensor) -> Tensor:
        conv = self.conv
        if self.weight_quantizer is None:
            return convolve(conv, x, conv.weight, conv.bias)
        if not self.clips_nothing:
            weight, s = at_least_float32(out_first(conv.weight, conv)), self.factor
            return convolve(conv, x, native(rescaled(weight, self.quantize_weight(scale_rows(weight, s)), s), conv), conv.bias)
        weight, s, what = self.quantized_outside()
        with torch.no_grad():
            dead, divisor = divisors(s)
            what.div_(per_row(divisor, weight))
            # Where s counts as 0 so does Q(s W): adding W there costs less than choosing.
            what.addcmul_(weight, per_row(dead.to(weight.dtype), weight))
        if self._one_function:
            return RescaledLayer.apply(x, weight, s, conv.bias, divisor, what, conv)
        return convolve(conv, x, native(RescaledWeight.apply(weight, s, divisor, what), conv), conv.bias)
