"""One layer's rounding as a problem of its own: samples of its input, the outputs they should give, and what a rounding misses of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.fold.arithmetic import out_first
from qat.graph.stream import Stream
from qat.ptq.product import NoProductError, Product, a_number_of, layer_output, outputs_of
from qat.ptq.rounding import annealed, rectified_sigmoid, rectified_sigmoid_gradient, regulariser_gradient
from qat.ptq.settings import Settings

Activation = Callable[[Tensor], Tensor]

# Positions of a picture in a minibatch, where the output has as many and there is more than so much to find for each channel.
PER_PICTURE = 64
MINIBATCH, MINIBATCH_PER_WEIGHT = 2**9, 2**5
# Samples of a layer that are looked at in all: so many for each weight of an output channel, between these ends, within so many bytes.
SAMPLES_PER_WEIGHT = 128
SAMPLES = (2**13, 2**16)
BUDGET = 2**30
# Of the largest sum of magnitudes: a product that misses the layer's output by more is not the layer.
_SAME_OUTPUT = 1e-3


@dataclass
class Problem:
    """minimise the mean over samples of || act(value codes x + bias) - target ||^2 over the codes, (g, C_out/g, C_in/g taps).

    Attributes:
        x: (g, C_in/g taps, M + R), M samples in random order and the first R of them again, so that every R side by side are a minibatch.
        target: (g, C_out/g, M + R).
        count, size: M and R.
        value: of one code, (g, C_out/g, 1).
        bias: (g, C_out/g, 1).
        finite: (), whether all that the samples were drawn from is.
    """

    x: Tensor
    target: Tensor
    count: int
    size: int
    value: Tensor
    bias: Tensor
    activation: Activation
    finite: Tensor

    @torch.no_grad()
    def error(self, codes: Tensor) -> Tensor:
        """() of int32 codes (C_out, C_in/g, *k), in float64, over all M samples."""
        weight = self._as_matrix(codes) * self.value
        total = self.x.new_zeros((), dtype=torch.float64)
        for first in range(0, self.count, self.size):
            some = slice(first, min(first + self.size, self.count))
            y = torch.baddbmm(self.bias, weight, self.x[..., some])
            total += (self.activation(outputs_of(y)) - outputs_of(self.target[..., some])).square_().sum(dtype=torch.float64)
        return total / self.count

    @torch.no_grad()
    def power(self) -> Tensor:
        """Mean over the M samples of || target ||^2, ()."""
        return self.target[..., : self.count].square().sum(dtype=torch.float64) / self.count

    def gradient(self, weight: Tensor, first: int) -> Tensor:
        """Of the mean over the minibatch that starts at `first`, for a weight (g, C_out/g, C_in/g taps)."""
        some = slice(first, first + self.size)
        x = self.x[..., some]
        y = torch.baddbmm(self.bias, weight, x).requires_grad_()
        with torch.enable_grad():
            output = self.activation(outputs_of(y))
        missed = (output.detach() - outputs_of(self.target[..., some])).mul_(2 / self.size)
        (of_y,) = torch.autograd.grad(output, y, missed)
        return torch.bmm(of_y, x.transpose(1, 2))

    @torch.no_grad()
    def step_error(self) -> Tensor:
        """What moving a weight by a step changes in its channel's output, squared, (g, C_out/g, 1): mean over samples and weights."""
        return self.value.square() * self.x[..., : self.count].square().mean((1, 2), keepdim=True)

    def _as_matrix(self, weight: Tensor) -> Tensor:
        return weight.to(self.x.dtype).reshape(*self.target.shape[:2], -1)

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
        v, lower, up = map(self._as_matrix, (v.clone(), lower, up))
        # Divided by its unit, the gradient is of a size that Adam's epsilon is small against, in every channel.
        unit = self.step_error().clamp(min=torch.finfo(self.x.dtype).tiny)
        adam = torch.optim.Adam([v.requires_grad_()], lr=settings.lr, fused=True)
        starts = torch.randint(self.count, (settings.iterations,), generator=generator).tolist()
        for step, first in enumerate(starts):
            h = rectified_sigmoid(v)
            gradient = self.gradient(torch.addcmul(lower, up, h).mul_(value), first).mul_(value).div_(unit)
            beta = annealed(step, settings.iterations, settings.warm_up, settings.beta)
            if beta is not None:
                gradient.add_(regulariser_gradient(h, beta), alpha=settings.regularisation)
            v.grad = gradient.mul_(up).mul_(rectified_sigmoid_gradient(v))
            adam.step()
            tick()
        return rectified_sigmoid(v.detach()).view(shape)


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
        batch_size: pictures.

    Raises:
        NoProductError: the layer is no product.
        QATError: no pictures.
    """
    layer, exact = layers
    weight, bias = out_first(exact.folded()[0], exact.conv), exact.folded()[1]
    product = Product(layer, weight)
    groups, inputs = product.groups, product.inputs
    pictures = [(len(x), product.positions(x)) for x in stream.inputs(0)]
    items, most = sum(n for n, _ in pictures), max(p for _, p in pictures)
    if not items:
        raise QATError(layer.name, "only batches without pictures", "at least one picture", "Leave such batches out.")
    bytes_each = (groups * inputs + len(bias)) * weight.element_size()
    each = max(1, min(max(SAMPLES[0], SAMPLES_PER_WEIGHT * inputs), SAMPLES[1], BUDGET // bytes_each) // items)
    count = sum(n * min(p, each) for n, p in pictures)
    size = min(count, batch_size * min(most, PER_PICTURE), max(MINIBATCH, MINIBATCH_PER_WEIGHT * inputs))
    order = torch.randperm(count, generator=generator).to(weight.device)
    x, target = weight.new_empty(groups, inputs, count + size), weight.new_empty(groups, len(bias) // groups, count + size)
    matrix, float_bias = product.matrix(weight), bias.view(groups, -1, 1)
    finite, done, rounded_bias = torch.ones((), dtype=torch.bool, device=weight.device), 0, bias
    for (n, p), got, wished in zip(pictures, stream.inputs(0), stream.inputs(1)):
        if not n:
            continue
        chosen = a_number_of(p, n, each, generator).to(weight.device)
        if not done:
            rounded_bias = layer.integer_layer(got[:1])[1]
            _check(product, exact, wished[:1], chosen[:1], weight)
        finite &= torch.isfinite(got.sum() + wished.sum())
        places = order[done : done + chosen.numel()]
        x[..., places] = product.met(got, chosen)
        y = activation(outputs_of(torch.baddbmm(float_bias, matrix, product.met(wished, chosen))))
        target[..., places] = y.T.reshape(groups, -1, len(y))
        done += len(places)
    x[..., count:], target[..., count:] = x[..., :size], target[..., :size]
    factor = scale if layer.behind_quantizer is None else scale * layer.behind_quantizer
    value = factor.to(weight.dtype).expand(len(bias)).reshape(groups, -1, 1)
    return Problem(x, target, count, size, value, rounded_bias.to(weight.dtype).view(groups, -1, 1), activation, finite)


def _check(product: Product, layer: FoldedConvBN, x: Tensor, chosen: Tensor, weight: Tensor) -> None:
    expected = layer_output(layer, x, weight)[0, chosen[0]]
    matrix, met = product.matrix(weight), product.met(x, chosen)
    size = torch.bmm(matrix.abs(), met.abs()).max()
    if bool((outputs_of(torch.bmm(matrix, met)) - expected).abs().max() > _SAME_OUTPUT * size):
        raise NoProductError(f"the forward of this {type(layer.conv).__name__} does more than weigh its inputs")
