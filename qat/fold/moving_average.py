"""moving_average: fold with the running statistics, which keep moving.

Source: [K18] arXiv 1806.08342, sect. 3.2.2, which finds that it destabilises training.
Integer graph simulated, and the training forward itself:

    y = conv(x, Q(gamma W / sigma)) + beta + gamma (b - mu) / sigma

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps) before this batch's update. The statistics of the batch
come from the float layer, without gradient: nothing tells the optimizer that a change of W moves them."""

import torch
from torch import Tensor

from qat.fold.base import FoldedConvBN


class MovingAverage(FoldedConvBN):
    strategy = "moving_average"

    def training_forward(self, x: Tensor) -> Tensor:
        y = self.inference_forward(x)
        with torch.no_grad():
            self.record(*self.statistics(x))
        return y
