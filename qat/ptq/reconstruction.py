"""One layer's rounding as a problem of its own: rows of its input, the outputs they should give, and what a rounding misses of these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.fold.arithmetic import out_first
from qat.graph.stream import Stream
from qat.ptq.rounding import annealed, rectified_sigmoid, rectified_sigmoid_gradient, regulariser_gradient
from qat.ptq.rows import NotRowsError, Rows, a_number_of, layer_output, outputs_of

Activation = Callable[[Tensor], Tensor]

# Positions of a picture in a minibatch, where the output has as many.
PER_PICTURE = 64
# Rows of a layer that are looked at in all: so many for each weight of an output channel, between these ends, within so many bytes.
ROWS_PER_WEIGHT = 128
ROWS = (2**13, 2**16)
BUDGET = 2**30
# Of the largest output: rows that miss the layer's output by more are not its rows.
_SAME_OUTPUT = 1e-3


@dataclass(frozen=True)
class Settings:
    """How a problem is solved; see `adaround`.

    Raises:
        QATError: a value out of its range.
    """

    iterations: int = 1000
    batch_size: int = 32
    lr: float = 1e-2
    regularisation: float = 0.01
    warm_up: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)

    def __post_init__(self) -> None:
        wrong = [
            ("iterations", not _is_count(self.iterations), "a whole number above 0", 1000),
            ("batch_size", not _is_count(self.batch_size), "a whole number above 0", 32),
            ("lr", not 0 < self.lr < math.inf, "a number above 0", 1e-2),
            ("regularisation", not 0 <= self.regularisation < math.inf, "a number of at least 0", 0.01),
            ("warm_up", not 0 <= self.warm_up < 1, "a share of the iterations below 1", 0.2),
            ("beta", not math.inf > self.beta[0] >= self.beta[1] > 1, "a first and a last exponent, both above 1 and falling", (20, 2)),
        ]
        for key, is_wrong, expected, example in wrong:
            if is_wrong:
                raise QATError(f"adaround.{key}", repr(getattr(self, key)), expected, f"Write {key}={example}.")


@dataclass
class Problem:
    """minimise the mean over rows of || act(x columns(value codes) + bias) - target ||^2 over the codes.

    Attributes:
        x: (g, M + R, C_in/g taps), M rows in random order and the first R of them again, so that every R in a row are a minibatch.
        target: (g, M + R, C_out/g).
        count, size: M and R.
        columns: brings an out-first weight (C_out, C_in/g, *k) into the form (g, C_in/g taps, C_out/g) in which x multiplies it.
        value: of one code, (g, 1, C_out/g).
        bias: (g, 1, C_out/g).
        finite: (), whether all that the rows were drawn from is.
    """

    x: Tensor
    target: Tensor
    count: int
    size: int
    columns: Callable[[Tensor], Tensor]
    value: Tensor
    bias: Tensor
    activation: Activation
    finite: Tensor

    @torch.no_grad()
    def error(self, codes: Tensor) -> Tensor:
        """() of int32 codes (C_out, C_in/g, *k), in float64, over all M rows."""
        weight = self.columns(codes.to(self.x.dtype)) * self.value
        total = self.x.new_zeros((), dtype=torch.float64)
        for first in range(0, self.count, self.size):
            some = slice(first, min(first + self.size, self.count))
            y = torch.baddbmm(self.bias, self.x[:, some], weight)
            total += (self.activation(outputs_of(y)) - outputs_of(self.target[:, some])).square_().sum(dtype=torch.float64)
        return total / self.count

    @torch.no_grad()
    def power(self) -> Tensor:
        """Mean over the M rows of || target ||^2, ()."""
        return self.target[:, : self.count].square().sum(dtype=torch.float64) / self.count

    def gradient(self, weight: Tensor, first: int) -> Tensor:
        """Of the mean over the minibatch that starts at `first`, for a weight in the form of `columns`."""
        some = slice(first, first + self.size)
        x = self.x[:, some]
        y = torch.baddbmm(self.bias, x, weight).requires_grad_()
        with torch.enable_grad():
            missed = (self.activation(outputs_of(y)) - outputs_of(self.target[:, some])).square().sum() / self.size
        (of_y,) = torch.autograd.grad(missed, y)
        return torch.bmm(x.transpose(1, 2), of_y)

    @torch.no_grad()
    def solve(
        self,
        v: Tensor,
        lower: Tensor,
        up: Tensor,
        settings: Settings,
        generator: torch.Generator,
        tick: Callable[[], Any] = lambda: None,
    ) -> Tensor:
        """h(V) after the iterations, in the shape of V.

        Args:
            v, lower, up: (C_out, C_in/g, *k), see `rounding.py`.
            generator: on the CPU, of the minibatches.
            tick: called after each iteration.
        """
        shape, value = v.shape, self.value
        v, lower, up = (self.columns(one.to(self.x.dtype)).contiguous() for one in (v, lower, up))
        adam = torch.optim.Adam([v.requires_grad_()], lr=settings.lr, fused=True)
        starts = torch.randint(self.count, (settings.iterations,), generator=generator).tolist()
        for step, first in enumerate(starts):
            h = rectified_sigmoid(v)
            gradient = self.gradient(torch.addcmul(lower, up, h).mul_(value), first).mul_(value)
            beta = annealed(step, settings.iterations, settings.warm_up, settings.beta)
            if beta is not None:
                gradient.add_(regulariser_gradient(h, beta), alpha=settings.regularisation)
            v.grad = gradient.mul_(up).mul_(rectified_sigmoid_gradient(v))
            adam.step()
            tick()
        return rectified_sigmoid(v.detach()).transpose(1, 2).reshape(shape)


@torch.no_grad()
def draw(
    stream: Stream,
    layers: tuple[FoldedConvBN, FoldedConvBN],
    scale: Tensor,
    activation: Activation,
    batch_size: int,
    generator: torch.Generator,
) -> Problem:
    """The problem of a layer in front of which the batches of a stream stand.

    Args:
        layers: in the quantized network and in the float one, in evaluation mode; the stream's networks in this order.
        scale: of the weight quantizer, () or (C_out).
        batch_size: pictures whose rows a minibatch has as many of.

    Raises:
        NotRowsError: the layer is no product of rows.
        QATError: no pictures.
    """
    layer, exact = layers
    weight, bias = out_first(exact.folded()[0], exact.conv), exact.folded()[1]
    rows = Rows(layer, weight)
    pictures = [(len(x), rows.positions(x)) for x in stream.inputs(0)]
    items, most = sum(n for n, _ in pictures), max(p for _, p in pictures)
    if not items:
        raise QATError(layer.name, "only batches without pictures", "at least one picture", "Leave such batches out.")
    per_row = rows.groups * rows.inputs + len(bias)
    wanted = min(max(ROWS[0], ROWS_PER_WEIGHT * rows.inputs), ROWS[1], BUDGET // (per_row * weight.element_size()))
    each = max(1, math.ceil(wanted / items))
    count = sum(n * min(p, each) for n, p in pictures)
    size = min(count, batch_size * min(most, PER_PICTURE))
    order = torch.randperm(count, generator=generator).to(weight.device)
    x = weight.new_empty(rows.groups, count + size, rows.inputs)
    target = weight.new_empty(rows.groups, count + size, len(bias) // rows.groups)
    columns, float_bias = rows.columns(weight), bias.view(rows.groups, 1, -1)
    finite, done, rounded_bias = torch.ones((), dtype=torch.bool, device=weight.device), 0, bias
    for (n, p), got, wished in zip(pictures, stream.inputs(0), stream.inputs(1)):
        if not n:
            continue
        chosen = a_number_of(p, n, each, generator).to(weight.device)
        if not done:
            rounded_bias = layer.integer_layer(got[:1])[1]
            _check(rows, exact, wished[:1], chosen[:1], weight)
        finite &= torch.isfinite(got.sum() + wished.sum())
        places = order[done : done + n * chosen.shape[1]]
        x[:, places] = rows.read(got, chosen)
        y = activation(outputs_of(torch.baddbmm(float_bias, rows.read(wished, chosen), columns)))
        target[:, places] = y.view(len(y), rows.groups, -1).transpose(0, 1)
        done += len(places)
    x[:, count:], target[:, count:] = x[:, :size], target[:, :size]
    factor = scale if layer.behind_quantizer is None else scale * layer.behind_quantizer
    value = factor.to(weight.dtype).expand(len(bias)).view(rows.groups, 1, -1)
    return Problem(x, target, count, size, rows.columns, value, rounded_bias.view(rows.groups, 1, -1), activation, finite)


def _check(rows: Rows, layer: FoldedConvBN, x: Tensor, chosen: Tensor, weight: Tensor) -> None:
    expected = layer_output(layer, x, weight)[0, chosen[0]]
    got = outputs_of(torch.bmm(rows.read(x, chosen), rows.columns(weight)))
    if bool((got - expected).abs().max() > _SAME_OUTPUT * expected.abs().max()):
        raise NotRowsError(f"the forward of this {type(layer.conv).__name__} does more than weigh its inputs")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
