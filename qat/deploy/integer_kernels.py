"""Convolution and matrix products on integer tensors, for every layer kind torch has, in int64.

`integer_kernels()` swaps them in below a layer's own forward, so that padding modes and subclasses stay as they are. They share nothing
with torch's float kernels: windows are gathered and multiplied as integers, so an overflow of an int32 accumulator shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class integer_kernels(TorchFunctionMode):  # noqa: N801 - used as a statement
    """Inside it torch's convolutions, linear and padding accept int64 tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kernel = _KERNELS.get(func)
        x = args[0] if args else (kwargs or {}).get("input")
        takes_integers = isinstance(x, Tensor) and x.dtype == torch.int64
        return kernel(*args, **(kwargs or {})) if kernel is not None and takes_integers else func(*args, **(kwargs or {}))


def convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """(N, C_in, *size) by (C_out, C_in/groups, *k) to (N, C_out, *size), int64."""
    rank = weight.dim() - 2
    steps, gaps = _each(stride, rank), _each(dilation, rank)
    spans = [gap * (k - 1) + 1 for gap, k in zip(gaps, weight.shape[2:])]
    if padding == "same":
        ends = [((span - 1) // 2, span - 1 - (span - 1) // 2) for span in spans]
    else:
        ends = [(p, p) for p in _each(0 if padding == "valid" else padding, rank)]
    windows = F.pad(input, [end for pair in reversed(ends) for end in pair])
    for axis, (span, step, gap) in enumerate(zip(spans, steps, gaps)):
        windows = windows.unfold(2 + axis, span, step)[..., ::gap]
    batch, size = len(input), windows.shape[2 : 2 + rank]
    # (N, C_in, *size, *k) to (N, groups, C_in/groups * k, size)
    order = [0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank)]
    columns = windows.permute(order).reshape(batch, groups, -1, size.numel())
    rows = weight.reshape(1, groups, weight.shape[0] // groups, -1)
    sums = (rows @ columns).reshape(batch, weight.shape[0], *size)
    return sums if bias is None else sums + bias.view([-1] + [1] * rank)


def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """(N, C_in, *size) by (C_in, C_out/groups, *k): the convolution of the input with zeros between its values by the turned kernel."""
    rank = weight.dim() - 2
    steps, gaps = _each(stride, rank), _each(dilation, rank)
    spread = input.new_zeros(*input.shape[:2], *((n - 1) * step + 1 for n, step in zip(input.shape[2:], steps)))
    spread[(slice(None), slice(None), *(slice(None, None, step) for step in steps))] = input
    ends = []
    for gap, k, pad, extra in zip(gaps, weight.shape[2:], _each(padding, rank), _each(output_padding, rank)):
        around = gap * (k - 1) - pad
        ends.append((around, around + extra))
    spread = F.pad(spread, [end for pair in reversed(ends) for end in pair])
    per_group = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
    return convolution(spread, per_group.flip(list(range(2, 2 + rank))), bias, dilation=dilation, groups=groups)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    sums = input @ weight.T
    return sums if bias is None else sums + bias


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Torch pads integers with constants only; other modes move values, which float64 holds exactly."""
    if mode == "constant":
        return torch.constant_pad_nd(input, list(pad), int(value or 0))
    return F.pad(input.double(), list(pad), mode).to(torch.int64)


def _each(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values


_KERNELS: dict[Any, Callable[..., Tensor]] = {
    torch.conv1d: convolution,
    torch.conv2d: convolution,
    torch.conv3d: convolution,
    torch.conv_transpose1d: transposed_convolution,
    torch.conv_transpose2d: transposed_convolution,
    torch.conv_transpose3d: transposed_convolution,
    F.linear: linear,
    F.pad: pad,
}
