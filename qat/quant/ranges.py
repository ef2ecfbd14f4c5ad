"""Range estimators: what part [lo, hi] of a tensor the integer grid should cover.

Each takes (x, spec, axis) and returns (lo, hi) of shape () or, for a per-channel spec, (C,), in float32 at least. A tensor (or channel)
that holds NaN or Inf gives a non-finite lo or hi, so that the caller can ignore it without waiting for the device.
"""

from collections.abc import Callable
from math import ceil, gcd

import torch
from torch import Tensor

from qat.quant.affine import at_least_float32, fake_quantize, qparams
from qat.quant.spec import QuantSpec

PERCENTILE = 99.99
# Ratios of the full range that the searches try: 1/RATIOS, 2/RATIOS ... 1.
RATIOS = 40
# Elements looked at, of a tensor and at least of each channel; larger ones are sampled evenly.
PERCENTILE_SAMPLES = (2**18, 2**12)
MSE_SAMPLES = (2**14, 2**9)
LOGIT_SAMPLES = (2**14, 2**6)
# Elements of all candidate ranges held in memory at a time.
SEARCH_CHUNK = 2**20


def minmax(x: Tensor, spec: QuantSpec, axis: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value."""
    if spec.per_channel:
        rows = _rows(x, spec, axis)
        # Two reductions: over a dimension they are several times faster on the CPU than aminmax.
        lo, hi = rows.amin(1), rows.amax(1)
    else:
        lo, hi = torch.aminmax(x)
    return at_least_float32(lo), at_least_float32(hi)


def percentile(x: Tensor, spec: QuantSpec, axis: int) -> tuple[Tensor, Tensor]:
    """The smallest value that at least 99.99 % of the elements do not exceed, and its mirror image for lo.

    An order statistic without interpolation: below 10000 elements it is the extreme itself.
    """
    rows = _sample(at_least_float32(_rows(x, spec, axis)), *PERCENTILE_SAMPLES)
    n = rows.shape[1]
    k = ceil(n * PERCENTILE / 100)
    lo, hi = rows.kthvalue(n + 1 - k, dim=1).values, rows.kthvalue(k, dim=1).values
    least, largest = (_shape(end, spec) for end in (lo, hi))
    full = minmax(x, spec, axis)
    finite = torch.isfinite(full[0] + full[1])
    return torch.where(finite, least, full[0]), torch.where(finite, largest, full[1])


def mse(x: Tensor, spec: QuantSpec, axis: int) -> tuple[Tensor, Tensor]:
    """The clipped range of least squared quantization error [WP21 eq. 16].

    Both ends are first shrunk by one ratio; on an asymmetric grid each end is then searched again with the other held, because an outlier
    on one side should not cost the other side its range.
    """
    rows = _sample(at_least_float32(_rows(x, spec, axis)), *MSE_SAMPLES)
    return _searched(x, spec, axis, rows, lambda quantized, own: quantized.sub_(own).square_().sum(1))


def cross_entropy(x: Tensor, spec: QuantSpec, axis: int = 0) -> tuple[Tensor, Tensor]:
    """The clipped range of least cross entropy H(softmax(x), softmax(Q(x))), for logits [WP21 eq. 17]; searched as that of `mse`.

    A squared error spends the grid on the many small logits; what decides a class are the few large ones.

    Args:
        x: (N, classes, *); at least two dimensions.
        spec: per tensor.
    """
    logits = _sample(at_least_float32(x.movedim(1, 0).flatten(1)), *LOGIT_SAMPLES)
    shares = logits.softmax(0)

    def entropy(quantized: Tensor, own: Tensor) -> Tensor:
        return quantized.view(-1, *logits.shape).log_softmax(1).mul_(shares).sum((1, 2)).neg_()

    return _searched(x, spec, axis, logits.reshape(1, -1), entropy)


RANGES: dict[str, Callable[[Tensor, QuantSpec, int], tuple[Tensor, Tensor]]] = {
    "minmax": minmax,
    "ema": minmax,  # the average is over batches: see running.py
    "percentile": percentile,
    "mse": mse,
}
# Of logits alone.
LOGIT_RANGES: dict[str, Callable[[Tensor, QuantSpec, int], tuple[Tensor, Tensor]]] = {"cross_entropy": cross_entropy}


# Error of each row of quantized values (K, n), which it may overwrite, beside the row's own (K, n); (K).
Error = Callable[[Tensor, Tensor], Tensor]


def _searched(x: Tensor, spec: QuantSpec, axis: int, rows: Tensor, error: Error) -> tuple[Tensor, Tensor]:
    """The range of x with the least error on rows (C, n), samples of it."""
    lo, hi = (end.view(-1) for end in minmax(x, spec, axis))
    ratios = torch.arange(RATIOS, 0, -1, device=rows.device, dtype=rows.dtype).div(RATIOS).unsqueeze(1)
    every_lo, every_hi = ratios * lo.clamp(max=0), ratios * hi.clamp(min=0)
    lo, hi = _least_error(rows, every_lo, every_hi, spec, error)
    if not spec.symmetric:
        lo, hi = _least_error(rows, lo.expand_as(every_hi), every_hi, spec, error)
        lo, hi = _least_error(rows, every_lo, hi.expand_as(every_lo), spec, error)
    return _shape(lo, spec), _shape(hi, spec)


def _least_error(rows: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec, error: Error) -> tuple[Tensor, Tensor]:
    """Of the candidate ranges lo, hi (K, C) the one with the least error on rows (C, n), the first of equals; two tensors (C,)."""
    errors = []
    per_chunk = max(1, SEARCH_CHUNK // rows.numel())
    for some_lo, some_hi in zip(lo.split(per_chunk), hi.split(per_chunk)):
        scale, zero_point = qparams(some_lo.flatten(), some_hi.flatten(), spec)
        repeated = rows.repeat(len(some_lo), 1)
        errors.append(error(fake_quantize(repeated, scale, zero_point, spec, 0), repeated).view_as(some_lo))
    best = torch.cat(errors).argmin(0, keepdim=True)
    return lo.gather(0, best).squeeze(0), hi.gather(0, best).squeeze(0)


def _rows(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """(C, elements of a channel), or (1, elements) per tensor."""
    return x.movedim(axis, 0).flatten(1) if spec.per_channel and x.dim() > 1 else x.reshape(x.numel() if spec.per_channel else 1, -1)


def _shape(value: Tensor, spec: QuantSpec) -> Tensor:
    return value if spec.per_channel else value.squeeze(0)


def _sample(rows: Tensor, total: int, per_channel: int) -> Tensor:
    channels, n = rows.shape
    step = ceil(n / max(per_channel, total // channels))
    # A step that shares no factor with the tensor's dimensions visits every row and column alike.
    while gcd(step, n) != 1 and step < n:
        step += 1
    return rows[:, ::step]
