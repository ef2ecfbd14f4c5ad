"""scale_merge: the BatchNorm stays alive on the quantized layer; deployment merges it into the scales of the weights.

Source: [WP21] arXiv 2106.08295, eq. 41; weights with one scale per output channel.
Integer graph simulated: conv(x, (gamma / sigma) Q(W)) + beta - gamma mu / sigma.

    training        u = conv(x, Q(W))        y = gamma (u - mu_u) / sigma_u + beta
    deployment      s_w,k <- |gamma_k / sigma_k| s_w,k        W_int,k <- sign(gamma_k) W_int,k        b_fold = beta + (b - mu) gamma / sigma

W, b: weight and bias of the layer. mu, sigma: running mean and sqrt(var + eps), which move with mu_u and var_u, the statistics of the
quantized layer. Scales are positive, so the sign of gamma goes to the integers, which is lossless on a grid without the lowest integer
only. Where gamma = 0 the integers are 0 and the scale stays that of W. A per-tensor scale cannot take one factor per channel."""

from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.fold.arithmetic import at_least_float32, native, out_first, per_row
from qat.fold.batch_norm import OutputNormalised
from qat.fold.convolution import convolve


def merged(codes: Tensor, scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 41: integers (C_out, C_in/g, *k) and scales (C_out) that take the factor gamma / sigma (C_out) of either sign, or 0."""
    scaled, dead = merged_scale(scale, factor)
    sign = torch.where(dead, 0, factor.sign()).to(codes.dtype)
    return codes * per_row(sign, codes), scaled


def merged_scale(scale: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """(scales that take the factor, where the factor is too small to be taken and the integers are 0 instead), (C_out) each."""
    scaled = factor.abs() * scale
    dead = scaled < torch.finfo(scaled.dtype).tiny
    return torch.where(dead, scale, scaled), dead


class ScaleMerge(OutputNormalised):
    """Raises QATError for a per-tensor quantizer, and for a negative gamma on a grid that is not symmetric and narrow."""

    strategy = "scale_merge"
    folds_rows = False

    def __init__(self, conv: nn.Module, bn: nn.Module, weight_quantizer: nn.Module | None = None):
        spec: Any = getattr(weight_quantizer, "spec", None)
        if spec is not None and not spec.per_channel:
            raise QATError(
                getattr(weight_quantizer, "name", "") or f"scale_merge of {type(conv).__name__}",
                "a per-tensor weight quantizer",
                "one scale per output channel, which the BatchNorm's factors are merged into",
                "Use QuantSpec(per_channel=True) for this layer's weights, or another fold strategy.",
            )
        super().__init__(conv, bn, weight_quantizer)
        self.check_signs()

    @property
    def behind_quantizer(self) -> Tensor:
        return self.factor

    def quantized(self) -> tuple[Tensor, Tensor]:
        weight = self.quantize_weight(self.weight_to_quantize())
        return native(weight * per_row(self.factor, weight), self.conv), self._folded_bias()

    def folded(self) -> tuple[Tensor, Tensor]:
        weight = self.weight_to_quantize()
        return native(weight * per_row(self.factor, weight), self.conv), self._folded_bias()

    @torch.no_grad()
    def weight_codes(self) -> tuple[Tensor, Tensor]:
        """As in the base, with the BatchNorm merged into codes and scales.

        Raises:
            QATError: also a negative gamma on a grid that a change of sign leaves.
        """
        self.check_signs()
        return merged(*super().weight_codes(), self.factor)

    @torch.no_grad()
    def weight_scale(self) -> Tensor:
        return merged_scale(super().weight_scale(), self.factor)[0]

    def weight_to_quantize(self) -> Tensor:
        return at_least_float32(out_first(self.conv.weight, self.conv))

    @torch.no_grad()
    def write_weight(self, weight: Tensor) -> None:
        self.conv.weight.copy_(native(weight, self.conv))

    def unnormalised(self, x: Tensor) -> Tensor:
        return convolve(self.conv, x, native(self.quantize_weight(self.weight_to_quantize()), self.conv), self.conv.bias)

    def check_signs(self) -> None:
        spec: Any = getattr(self.weight_quantizer, "spec", None)
        if spec is not None and not (spec.symmetric and spec.narrow) and bool((self.gamma < 0).any()):
            raise QATError(
                self.name or f"scale_merge of {type(self.conv).__name__}",
                f"{int((self.gamma < 0).sum())} channels with a negative gamma on the weight grid [{spec.qmin}, {spec.qmax}]",
                "a grid that a change of sign does not leave",
                "Use QuantSpec(symmetric=True, narrow=True) for this layer's weights, or another fold strategy.",
            )
