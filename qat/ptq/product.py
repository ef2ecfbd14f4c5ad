"""A quantized layer as a product of matrices: its weights, times the inputs they meet at single positions of its output.

Which input meets which weight is found by running the layer once on a picture of the inputs' own numbers, with weights that are 1 at one
tap and 0 elsewhere; so padding, stride, dilation, transposition and forwards of subclasses are the layer's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat.fold import FoldedConvBN
from qat.fold.arithmetic import native
from qat.fold.convolution import convolve


class Product:
    """
    out-first weight (C_out, C_in/g, *k)   ->   matrix (g, C_out/g, C_in/g taps)
    input (N, C_in, *)                     ->   met (g, C_in/g taps, N P) at P positions of the output for each item
    output, without bias                   =    matrix @ met (g, C_out/g, N P), see `outputs_of`
    """

    def __init__(self, layer: FoldedConvBN, weight: Tensor):
        """
        Args:
            weight: out-first; its shape, type and device are used.
        """
        self._conv, self._like = layer.conv, weight
        self.linear = isinstance(layer.conv, nn.Linear)
        self.groups = 1 if self.linear else int(layer.conv.groups)
        self.inputs = weight[0].numel()
        self._maps: dict[torch.Size, Tensor] = {}

    def matrix(self, weight: Tensor) -> Tensor:
        return weight.reshape(self.groups, -1, self.inputs)

    def positions(self, x: Tensor) -> int:
        """How many positions the output for x has, of one item of the batch.

        Raises:
            NoProductError: the layer is more than a product of its weights with its inputs.
        """
        return math.prod(x.shape[1:-1]) if self.linear else len(self._map(x))

    def met(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What the weights meet in x at the positions `chosen` (N, P) of each item."""
        if self.linear:
            items = x.reshape(len(x), -1, self.inputs)
            return items.gather(1, chosen.unsqueeze(2).expand(-1, -1, self.inputs)).reshape(1, -1, self.inputs).transpose(1, 2)
        where = self._map(x)[chosen].flatten(1)
        flat = x.flatten(2)
        if bool((where < 0).any()):
            flat, where = F.pad(flat, (1, 0)), where + 1
        met = flat.gather(2, where.unsqueeze(1).expand(-1, flat.shape[1], -1))
        n, p = chosen.shape
        return met.view(n, self.groups, -1, p, met.shape[2] // p).permute(1, 2, 4, 0, 3).reshape(self.groups, self.inputs, n * p)

    def _map(self, x: Tensor) -> Tensor:
        """(positions, taps): the index of the input met, -1 for padding."""
        if x.shape[1:] not in self._maps:
            self._maps[x.shape[1:]] = self._found(x)
        return self._maps[x.shape[1:]]

    @torch.no_grad()
    def _found(self, x: Tensor) -> Tensor:
        if x.dim() != self._like.dim():
            raise NoProductError(f"its input has rank {x.dim()}")
        size = math.prod(x.shape[2:])
        picture = torch.arange(1, size + 1, dtype=torch.float64, device=x.device).view(1, 1, *x.shape[2:]).expand(1, *x.shape[1:])
        taps, met = self._like[0, 0].numel(), []
        rows = self._like.shape[0] // self.groups  # of the first group
        for first in range(0, taps, rows):
            some = min(rows, taps - first)
            ones = torch.zeros_like(self._like, dtype=torch.float64)
            ones[:some, 0].flatten(1).diagonal(first).fill_(1)
            met.append(convolve(self._conv, picture, native(ones, self._conv), None)[0, :some].flatten(1))
        found = torch.cat(met).T
        index = found.round().long() - 1
        if bool((found.round() != found).any()) or int(index.min()) < -1 or int(index.max()) >= size:
            raise NoProductError(f"the forward of this {type(self._conv).__name__} does more than weigh its inputs")
        return index


class NoProductError(Exception):
    """A layer that is no product of its weights with single inputs; says why."""


def outputs_of(products: Tensor) -> Tensor:
    """(g, C_out/g, R) -> (R, C_out), as activations expect the channels."""
    return products.flatten(0, 1).T


def a_number_of(positions: int, items: int, wanted: int, generator: torch.Generator) -> Tensor:
    """(items, wanted) different positions of each item, all of them in order where there are no more; on the CPU."""
    if wanted >= positions:
        return torch.arange(positions).expand(items, positions)
    return torch.rand(items, positions, generator=generator).topk(wanted, dim=1).indices


def layer_output(layer: Any, x: Tensor, weight: Tensor) -> Tensor:
    """(N, P, C_out): the layer's output without bias for out-first `weight`, position by position."""
    y = convolve(layer.conv, x, native(weight, layer.conv), None)
    return y.reshape(len(y), -1, y.shape[-1]) if isinstance(layer.conv, nn.Linear) else y.flatten(2).transpose(1, 2)
