"""The equations of AdaRound [AR, arXiv 2004.10568, eq. 21-25].

    W~ = s clip(floor(W / s) + h(V), n, p)        h(V) = clip(1.2 sigmoid(V) - 0.1, 0, 1)        f(V) = sum of 1 - |2 h(V) - 1|^beta

W, V: (C_out, C_in/g, *k). s: () or (C_out). n, p: ends of the grid. Since n and p are integers, W~ is s (lower + up h(V)) with
lower = clip(floor(W / s), n, p) and up = 1, or 0 where both roundings are the same integer: at the ends, and where W / s is an integer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qat.errors import QATError
from qat.quant import QuantSpec
from qat.quant.affine import along, at_least_float32

# h reaches 0 and 1 at finite V: zeta = 1.1 and gamma = -0.1 in the paper.
_STRETCH, _SHIFT = 1.2, -0.1
# W / s counts as an integer within this, relative to its size: weights that were on the grid before have moved by the last bits of float32.
_SAME = 2.0**-20


def both_roundings(weight: Tensor, scale: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """(lower, up): the lower integer within the grid, and 1 where the upper one is another, else 0; in the type of `weight`."""
    steps = _steps(weight, scale)
    lower = steps.floor().clamp(spec.qmin, spec.qmax)
    return lower, steps.ceil().clamp(spec.qmin, spec.qmax) - lower


def start(weight: Tensor, scale: Tensor) -> Tensor:
    """V with h(V) = W / s - floor(W / s), so that W~ = W within the grid."""
    steps = _steps(weight, scale)
    return -torch.log(_STRETCH / (steps - steps.floor() - _SHIFT) - 1)


def rectified_sigmoid(v: Tensor) -> Tensor:
    """h(V), from 0 to 1 inclusive [eq. 23]."""
    return (torch.sigmoid(v) * _STRETCH + _SHIFT).clamp(0, 1)


def rectified_sigmoid_gradient(v: Tensor) -> Tensor:
    """dh / dV, 0 where h is clipped."""
    sigmoid = torch.sigmoid(v)
    h = sigmoid * _STRETCH + _SHIFT
    return _STRETCH * sigmoid * (1 - sigmoid) * ((h > 0) & (h < 1))


def regulariser(h: Tensor, beta: float) -> Tensor:
    """Sum of 1 - |2 h - 1|^beta, (): 0 when every h is 0 or 1 [eq. 24]."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


def regulariser_gradient(h: Tensor, beta: float) -> Tensor:
    """d regulariser / dh."""
    u = 2 * h - 1
    return u.abs().pow(beta - 1).mul_(u.sign()).mul_(-2 * beta)


def annealed(step: int, steps: int, warm_up: float, beta: tuple[float, float]) -> float | None:
    """beta at `step` of `steps`: half a cosine from beta[0] down to beta[1]; None while warming up, when nothing regularises."""
    begin = warm_up * steps
    if step < begin:
        return None
    share = (step - begin) / max(steps - 1 - begin, 1)
    return beta[1] + (beta[0] - beta[1]) * (1 + math.cos(math.pi * min(share, 1.0))) / 2


def hard_codes(lower: Tensor, up: Tensor, h: Tensor) -> Tensor:
    """int32 codes: up where h >= 0.5, else lower."""
    return (lower + up * (h >= 0.5)).to(torch.int32)


def check_grid(name: str, codes: Tensor, weight: Tensor, scale: Tensor, spec: QuantSpec) -> None:
    """Every code is floor(W / s) or ceil(W / s), clipped to the grid.

    Raises:
        QATError: naming the layer, with the number of weights that are not.
    """
    lower, up = both_roundings(weight, scale, spec)
    off = (codes != lower) & (codes != lower + up)
    if bool(off.any()):
        where = tuple(off.nonzero()[0].tolist())
        found = f"{int(off.sum())} codes that are no rounding of their weight, the first {int(codes[where])} at {where}"
        expected = f"{int(lower[where])} or {int((lower + up)[where])} there"
        raise QATError(name, found, expected, "Take the weights and scale that the codes were made from.")


def _steps(weight: Tensor, scale: Tensor) -> Tensor:
    """W / s, as an integer where it is one but for the last bits of float32."""
    weight = at_least_float32(weight)
    steps = weight / along(scale.to(weight.dtype), weight, 0)
    nearest = steps.round()
    return torch.where((steps - nearest).abs() <= _SAME * nearest.abs().clamp(min=1), nearest, steps)
