"""moving_average: fold with the running statistics, which keep moving.

Source: [K18] arXiv 1806.08342, sect. 3.2.2, which finds that it destabilises training.
Integer graph simulated, and the training forward itself:

    y = conv(x, Q(gamma W / sigma)) + beta + gamma (b - mu) / sigma

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps) before this batch's update. The statistics of the batch
have no gradient: nothing tells the optimizer that a change of W moves them. They come from the float layer, by a second convolution, or,
with statistics="quantized", from y itself, which a step then computes alone:

    mu_B = (mean of y - b_fold) / s + b        var_B = var of y / s^2        s = gamma / sigma
"""

import torch
from torch import Tensor, nn

from qat.choose import check_name
from qat.fold.arithmetic import divisors
from qat.fold.base import FoldedConvBN
from qat.fold.statistics import Count, batch_statistics

SOURCES = {"float": "the float layer", "quantized": "the quantized layer"}


class MovingAverage(FoldedConvBN):
    """Args: statistics, "float" or "quantized", whose output the batch's statistics are of. Where gamma is 0 those of the quantized
    layer are unknown, and the running ones rest. While statistics are pooled they are the float layer's in either case.

    Raises:
        ConfigError: another word.
    """

    strategy = "moving_average"

    def __init__(self, conv: nn.Module, bn: nn.Module, weight_quantizer: nn.Module | None = None, *, statistics: str = "float"):
        super().__init__(conv, bn, weight_quantizer)
        self.source = check_name("moving_average.statistics", statistics, SOURCES)

    def training_forward(self, x: Tensor) -> Tensor:
        y, bias = self.integer_layer(x)
        with torch.no_grad():
            self.record(*(self.statistics(x) if self.source == "float" else self._statistics_of(y, bias)))
        return self.activation(y)

    def _statistics_of(self, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Count]:
        mean, var, count = batch_statistics(y, name=self.name, group=self.group)
        dead, s = divisors(self.factor)
        own = 0.0 if self.conv.bias is None else self.conv.bias
        mean = torch.where(dead, self.bn.running_mean, (mean - bias) / s + own)
        # The running variance is unbiased.
        return mean, torch.where(dead, self.bn.running_var * ((count - 1) / count), var / s.square()), count
