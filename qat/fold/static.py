"""static: fold once, before training; the BatchNorm is gone.

Source: [WP21] arXiv 2106.08295, sect. 4.2; [MQ] arXiv 2111.03759, strategy 0.
Integer graph simulated, and the training forward itself:

    y = conv(x, Q(W_fold)) + b_fold        W_fold = gamma W / sigma        b_fold = beta + (b - mu) gamma / sigma

W_fold and b_fold are the parameters. Nothing normalises in training: start from a trained float model with a small learning rate.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qat.fold.arithmetic import fold_bias, fold_weight, native, out_first, sigma
from qat.fold.base import FoldedConvBN
from qat.fold.convolution import without_parameters


def fold_once(conv: Any, bn: Any) -> tuple[Tensor, Tensor | None]:
    """(weight in the layer's own layout, bias (C_out) or None), detached copies; without a BatchNorm the layer's own."""
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach()
    if bn is None:
        return weight.clone(), None if bias is None else bias.clone()
    running_sigma = sigma(bn.running_var, bn.eps)
    gamma = weight.new_ones(running_sigma.shape) if bn.weight is None else bn.weight.detach()
    beta = weight.new_zeros(running_sigma.shape) if bn.bias is None else bn.bias.detach()
    folded = native(fold_weight(out_first(weight, conv), gamma, running_sigma), conv)
    return folded.to(weight.dtype), fold_bias(bias, gamma, beta, bn.running_mean, running_sigma).to(weight.dtype)


class Static(FoldedConvBN):
    """Parameters `weight_fold` (the layer's own layout) and `bias_fold` (C_out). `conv` is a copy that keeps only how the layer computes.

    With bn=None this is the quantized layer as it is; then `bias_fold` is None where the layer has no bias.
    """

    strategy = "static"
    keeps_bn = False
    folds_rows = False
    bias_key = "bias_fold"

    def __init__(self, conv: nn.Module, bn: nn.Module | None = None, weight_quantizer: nn.Module | None = None):
        super().__init__(conv, bn, weight_quantizer)
        weight, bias = fold_once(conv, bn)
        trained = [p for m in (conv, bn) if m is not None for p in m.parameters(recurse=False)]
        self.weight_fold = nn.Parameter(weight, requires_grad=self.conv.weight.requires_grad)
        self.bias_fold = None if bias is None else nn.Parameter(bias, requires_grad=any(p.requires_grad for p in trained))
        self.conv, self.bn = without_parameters(conv), None
        self.batch_mean = self.batch_var = None  # type: ignore[assignment]
        self._start_ranges()

    def training_forward(self, x: Tensor) -> Tensor:
        return self.inference_forward(x)

    def weight_to_quantize(self) -> Tensor:
        return out_first(self.weight_fold, self.conv)

    @torch.no_grad()
    def write_weight(self, weight: Tensor) -> None:
        self.weight_fold.copy_(native(weight, self.conv))

    @torch.no_grad()
    def add_to_bias(self, change: Tensor) -> None:
        self._give_bias()
        assert self.bias_fold is not None
        self.bias_fold.add_(change.to(self.bias_fold.dtype))

    def _give_bias(self) -> None:
        if self.bias_fold is None:
            self.bias_fold = nn.Parameter(self._folded_bias().to(self.weight_fold.dtype), requires_grad=self.weight_fold.requires_grad)

    def _folded_bias(self) -> Tensor:
        if self.bias_fold is None:
            return self.weight_fold.new_zeros(self.weight_to_quantize().shape[0])
        return self.bias_fold
