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
# Ratios of the full range that the mse search tries: 1/RATIOS, 2/RATIOS ... 1.
RATIOS = 64
# Elements (of the tensor, and at least of a channel) that percentile and mse look at; larger tensors are sampled evenly.
SAMPLES = 2**16
CHANNEL_SAMPLES = 1024


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
    rows = _sample(at_least_float32(_rows(x, spec, axis)))
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
    full_lo, full_hi = minmax(x, spec, axis)
    rows = _sample(at_least_float32(_rows(x, spec, axis)))
    start = (full_lo.view(-1).clamp(max=0), full_hi.view(-1).clamp(min=0))
    best = start
    least = torch.full_like(start[0], torch.inf)
    ratios = [i / RATIOS for i in range(RATIOS, 0, -1)]
    for ends in ((True, True),) if spec.symmetric else ((True, True), (False, True), (True, False)):
        held = best
        for ratio in ratios:
            candidate = tuple(full * ratio if moves else end for full, end, moves in zip(start, held, ends))
            error = _error(rows, candidate[0], candidate[1], spec)
            better = error < least
            least = torch.where(better, error, least)
            best = (torch.where(better, candidate[0], best[0]), torch.where(better, candidate[1], best[1]))
    return _shape(best[0], spec), _shape(best[1], spec)


RANGES: dict[str, Callable[[Tensor, QuantSpec, int], tuple[Tensor, Tensor]]] = {
    "minmax": minmax,
    "ema": minmax,  # the average is over batches: see running.py
    "percentile": percentile,
    "mse": mse,
}


def _error(rows: Tensor, lo: Tensor, hi: Tensor, spec: QuantSpec) -> Tensor:
    scale, zero_point = qparams(lo, hi, spec)
    return (fake_quantize(rows, scale, zero_point, spec, 0) - rows).square_().sum(1)


def _rows(x: Tensor, spec: QuantSpec, axis: int) -> Tensor:
    """(C, elements of a channel), or (1, elements) per tensor."""
    return x.movedim(axis, 0).flatten(1) if spec.per_channel and x.dim() > 1 else x.reshape(x.numel() if spec.per_channel else 1, -1)


def _shape(value: Tensor, spec: QuantSpec) -> Tensor:
    return value if spec.per_channel else value.squeeze(0)


def _sample(rows: Tensor) -> Tensor:
    channels, n = rows.shape
    step = ceil(n / max(CHANNEL_SAMPLES, SAMPLES // channels))
    # A step that shares no factor with the tensor's dimensions visits every row and column alike.
    while gcd(step, n) != 1 and step < n:
        step += 1
    return rows[:, ::step]
