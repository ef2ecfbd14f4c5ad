"""Folding a BatchNorm into the layer before it, as pure functions [K18 eq. 20-21, WP21 eq. 9-12].

    s = gamma / sigma        W_fold = s W        b_fold = (b - mu) s + beta        sigma = sqrt(var + eps)

gamma, beta, mu, sigma, b: (C_out). Weights are handled "out-first", (C_out, C_in/g, *k), so that a factor per output channel is always a
factor per row; `out_first` and `native` convert. Half types are widened to float32: a fold in half precision moves weights off their grid.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.quant.affine import at_least_float32


def out_first(weight: Tensor, conv: nn.Module) -> Tensor:
    """The layer's own layout -> (C_out, C_in/g, *k).

    A transposed convolution stores (C_in, C_out/g, *k), where entry [i, j] of group k belongs to output channel k C_out/g + j.
    Other layers store rows per output channel already.
    """
    return _swap_in_groups(weight, conv)


def native(weight: Tensor, conv: nn.Module) -> Tensor:
    """(C_out, C_in/g, *k) -> the layer's own layout; the inverse of `out_first`."""
    return _swap_in_groups(weight, conv)


def _swap_in_groups(weight: Tensor, conv: nn.Module) -> Tensor:
    if not getattr(conv, "transposed", False):
        return weight
    # (g A, B, *k) -> (g, A, B, *k) -> (g, B, A, *k) -> (g B, A, *k), which undoes itself.
    return weight.unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(0, 1)


def sigma(var: Tensor, eps: float) -> Tensor:
    """sqrt(var + eps), (C_out)."""
    return (at_least_float32(var) + eps).sqrt()


def per_row(value: Tensor, weight: Tensor) -> Tensor:
    """(C_out) viewed so that it broadcasts over the rows of an out-first weight."""
    return value.view([-1] + [1] * (weight.dim() - 1))


def fold_weight(weight_out_first: Tensor, gamma: Tensor, sigma: Tensor) -> Tensor:
    """gamma / sigma times each row of (C_out, C_in/g, *k)."""
    return scale_rows(weight_out_first, at_least_float32(gamma) / sigma)


def scale_rows(weight_out_first: Tensor, s: Tensor) -> Tensor:
    """s (C_out) times each row of (C_out, C_in/g, *k)."""
    return at_least_float32(weight_out_first) * per_row(s, weight_out_first)


def fold_bias(bias: Tensor | None, gamma: Tensor, beta: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """(b - mu) gamma / sigma + beta, (C_out); no bias counts as 0. `mean` is that of the layer's output with its bias."""
    return shift_bias(bias, at_least_float32(gamma) / sigma, beta, mean)


def shift_bias(bias: Tensor | None, s: Tensor, beta: Tensor, mean: Tensor) -> Tensor:
    """(b - mu) s + beta, (C_out)."""
    # Never a product with `mean` itself: autograd would keep the running buffer, which the same step then moves in place.
    offset = mean.neg() if bias is None else bias - mean
    return torch.addcmul(at_least_float32(beta), at_least_float32(offset), s)


def corrected(u: Tensor, bias: Tensor | None, gamma: Tensor, beta: Tensor, mu_B: Tensor, sigma_B: Tensor, sigma: Tensor) -> Tensor:
    """u sigma / sigma_B + beta - gamma mu_B / sigma_B: the batch-normalised output from u = conv(x, Q(gamma W / sigma)) [K18 eq. 22-27].

    Args:
        u: (N, C_out, *), without bias.
        bias: the layer's own b, which mu_B contains and which cancels.
    """
    return scale_shift(u, sigma / sigma_B, fold_bias(bias, gamma, beta, mu_B, sigma_B))


def scale_shift(u: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """u scale + shift with one factor and one offset per channel (dim 1), in the type of u."""
    # A batch norm of mean 0 and variance 1: one kernel forward and one backward, in float32 also for half u. Written out, the products and
    # the sums of the gradient take several passes over the activation (1.6 to 2.3 times the time at 32x32 and 8x8 on a CPU).
    return F.batch_norm(u, torch.zeros_like(scale), torch.ones_like(scale), scale, shift, False, 0.0, 0.0)


def divisors(s: Tensor) -> tuple[Tensor, Tensor]:
    """(where s counts as 0, s with 1 in these places), (C_out) each. A subnormal s counts as 0: its reciprocal is infinite."""
    dead = s.abs() < torch.finfo(s.dtype).tiny
    # The unused branch of `where` must not divide by 0 either: its gradient would be 0 * inf.
    return dead, torch.where(dead, 1.0, s)
