"""What a layer with its own forward does with its weight and bias, found by running it on a tiny input.

The numbers are fixed, not random, so that a probe leaves the random state alone.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from qat.fold.arithmetic import native, out_first, per_row


def adds_bias(conv: nn.Module, weight: Tensor) -> bool:
    """Whether a bias handed to the layer is added to its output, also where it was built without one.

    Each layer is asked once, and its copies never: the answer is kept on it. A traced or compiled forward could not ask.
    """
    if "_adds_bias" not in conv.__dict__:
        conv.__dict__["_adds_bias"] = _adds_bias(conv, weight)
    return conv.__dict__["_adds_bias"]


def _adds_bias(conv: nn.Module, weight: Tensor) -> bool:
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        bias = _wave((out_channels(conv),), weight) + 2
        plain, biased = _run(conv, weight, torch.zeros_like(bias)), _run(conv, weight, bias)
        expected = plain + bias.view([1, -1] + [1] * (plain.dim() - 2))
        return bool((biased - expected).abs().max() <= 1e-2 * expected.abs().max())


def is_linear_in_weight(conv: nn.Module, weight: Tensor) -> bool:
    """Whether f(s W + V) = s f(W) + f(V) for a factor s of each output channel: what folding relies on.

    Args:
        weight: in the layer's own layout; only its shape, type and device are used.
    """
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        first, second = _wave(weight.shape, weight), _wave(weight.shape, weight, step=0.7)
        factor = _wave((out_channels(conv),), weight) * 3
        none = torch.zeros_like(factor)
        rows = out_first(first, conv)
        left = _run(conv, native(rows * per_row(factor, rows), conv) + second, none)
        right = _run(conv, first, none) * factor.view([1, -1] + [1] * (left.dim() - 2)) + _run(conv, second, none)
        return bool((left - right).abs().max() <= 1e-2 * right.abs().max())


def is_linear_in_input(conv: nn.Module, weight: Tensor) -> bool:
    """Whether f(2 x + y) = 2 f(x) + f(y) without bias: an integer layer is handed x / s_x."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        none = _wave((out_channels(conv),), weight) * 0
        x = probe_input(conv, weight)
        y = _wave(x.shape, x, step=0.7)
        left = _run(conv, weight, none, 2 * x + y)
        right = 2 * _run(conv, weight, none, x) + _run(conv, weight, none, y)
        return bool((left - right).abs().max() <= 1e-2 * right.abs().max().clamp(min=1e-6))


def probe_input(conv: Any, weight: Tensor) -> Tensor:
    """The smallest comfortable input, (1, C_in, *size): larger than the dilated kernel and than any padding."""
    if isinstance(conv, nn.Linear):
        return _wave((2, weight.shape[1]), weight)
    size = [
        dilation * (kernel - 1) + 2 + 2 * (0 if isinstance(conv.padding, str) else padding)
        for kernel, dilation, padding in zip(weight.shape[2:], conv.dilation, conv.padding)
    ]
    return _wave((1, conv.in_channels, *size), weight)


def out_channels(conv: Any) -> int:
    return conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels


def _run(conv: nn.Module, weight: Tensor, bias: Tensor, x: Tensor | None = None) -> Tensor:
    # A copy in eval mode: a forward may draw random numbers or move buffers in training.
    values = {"weight": weight.to(bias.dtype), "bias": bias}
    return functional_call(copy.deepcopy(conv).eval(), values, (probe_input(conv, weight) if x is None else x,))


def _wave(shape: tuple[int, ...] | torch.Size, like: Tensor, step: float = 1.0) -> Tensor:
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=dtype, device=like.device) * step + 0.5).sin().view(shape)
