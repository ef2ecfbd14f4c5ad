"""A layer of a float network together with the BatchNorm behind it, seen as the one layer that they fold into."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.errors import QATError
from qat.fold import check_foldable
from qat.fold.arithmetic import native, out_first, per_row
from qat.fold.normal_output import normal_output
from qat.fold.static import fold_once
from qat.graph.kinds import WEIGHTED, module_of
from qat.graph.match import match, owners
from qat.graph.prepared import QuantGraph


@dataclass(eq=False)
class Layer:
    """Rows and columns of the folded weight are scaled where the float network keeps them: a row in gamma and beta, a column in the layer.

    Attributes:
        name: qualified name of the layer.
        end: graph node of the output, behind the BatchNorm.
        known: the network's `normal_outputs`; that of this layer is scaled and shifted along.
    """

    name: str
    end: fx.Node
    conv: Any
    bn: Any
    known: dict[str, tuple[Tensor, Tensor]]

    @property
    def groups(self) -> int:
        return getattr(self.conv, "groups", 1)

    @property
    def is_depthwise(self) -> bool:
        """One filter for each channel, so that scaling an input channel scales an output channel."""
        return not isinstance(self.conv, nn.Linear) and self.groups == self.conv.in_channels == self.conv.out_channels

    def folded(self) -> tuple[Tensor, Tensor]:
        """(weight (C_out, C_in/g, *k), bias (C_out)) with the BatchNorm folded in."""
        weight, bias = fold_once(self.conv, self.bn)
        weight = out_first(weight, self.conv)
        return weight, weight.new_zeros(weight.shape[0]) if bias is None else bias

    def output_ranges(self) -> Tensor:
        """Largest magnitude of the weights that make each output channel, (C_out)."""
        return self.folded()[0].abs().flatten(1).amax(1)

    def input_ranges(self) -> Tensor:
        """Largest magnitude of the weights that read each input channel, (C_in)."""
        return self._by_input(self.folded()[0]).abs().amax((1, 3)).flatten()

    def through(self, change: Tensor) -> Tensor:
        """What a constant change of the inputs (C_in) does to the layer's own output, before the BatchNorm, (C_out); padding aside."""
        taps = self._by_input(out_first(self.conv.weight.detach(), self.conv)).sum(3)
        return (taps @ change.to(taps.dtype).view(self.groups, -1, 1)).flatten()

    @property
    def normal(self) -> tuple[Tensor, Tensor] | None:
        """(mean, standard deviation) of the output before the activation, (C_out) each; None where no BatchNorm told them."""
        if self.bn is not None:
            return normal_output(self.bn)
        return self.known.get(self.name)

    def scale_outputs(self, factor: Tensor) -> None:
        """Multiply each output channel by a positive factor (C_out)."""
        if self.bn is not None:
            self._give_affine()
            self.bn.weight.mul_(factor)
            self.bn.bias.mul_(factor)
            return
        own = out_first(self.conv.weight, self.conv)
        self.conv.weight.copy_(native(own * per_row(factor, own), self.conv))
        if self.conv.bias is not None:
            self.conv.bias.mul_(factor)
        if self.name in self.known:
            mean, deviation = self.known[self.name]
            self.known[self.name] = mean * factor, deviation * factor

    def scale_inputs(self, factor: Tensor) -> None:
        """Multiply the weights that read each input channel by a factor (C_in)."""
        own = out_first(self.conv.weight, self.conv)
        scaled = self._by_input(own) * factor.view(self.groups, 1, -1, 1)
        self.conv.weight.copy_(native(scaled.view(own.shape), self.conv))

    def shift_outputs(self, change: Tensor) -> None:
        """Add (C_out) to the output, behind the BatchNorm."""
        if self.bn is not None:
            self._give_affine()
            self.bn.bias.add_(change)
            return
        self._add_to_own_bias(change)
        if self.name in self.known:
            mean, deviation = self.known[self.name]
            self.known[self.name] = mean + change, deviation

    def follow_inputs(self, change: Tensor) -> None:
        """Leave the output as it is where the inputs change by a constant (C_in): in the running mean, as training will find it."""
        if self.bn is not None:
            self.bn.running_mean.add_(self.through(change))
        else:
            self._add_to_own_bias(-self.through(change))

    def _by_input(self, weight: Tensor) -> Tensor:
        """(C_out, C_in/g, *k) -> (g, C_out/g, C_in/g, k)."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, weight.shape[1], -1)

    def _add_to_own_bias(self, change: Tensor) -> None:
        if self.conv.bias is None:
            self.conv.bias = nn.Parameter(torch.zeros_like(change, dtype=self.conv.weight.dtype), self.conv.weight.requires_grad)
        self.conv.bias.add_(change)

    def _give_affine(self) -> None:
        for key, fill in (("weight", 1.0), ("bias", 0.0)):
            if getattr(self.bn, key) is None:
                setattr(self.bn, key, nn.Parameter(torch.full_like(self.bn.running_mean, fill), self.conv.weight.requires_grad))
        if hasattr(self.bn, "affine"):
            self.bn.affine = True  # conversions to other norms read it


def layers_of(graph: QuantGraph, keeps_whole: Callable[[str], bool]) -> tuple[dict[fx.Node, Layer], list[tuple[str, str]]]:
    """The layers that may be changed, by the graph node that calls them, in graph order; pairs (name, reason) of the others.

    Args:
        keeps_whole: tells by qualified name what an override leaves as it is.

    Raises:
        QATError: NaN or Inf in a layer.
    """
    modules = dict(graph.named_modules(remove_duplicate=False))
    calls = Counter(id(module_of(node, modules)) for node in graph.graph.nodes)
    owned = owners(graph)
    norms = {pair.layer: pair.norm for pair in match(graph, graph, keeps_whole)[0]}
    found: dict[fx.Node, Layer] = {}
    left: dict[str, str] = {}
    for node in graph.graph.nodes:
        conv, name = module_of(node, modules), str(node.target)
        if not isinstance(conv, WEIGHTED):
            continue
        if keeps_whole(name):
            left[name] = "skipped, or kept whole, by an override"
        elif calls[id(conv)] > 1:
            left[name] = f"called at {calls[id(conv)]} places"
        elif len(node.args) != 1 or node.kwargs:
            left[name] = "called with more than its input"
        elif any(len(owned[id(p)]) > 1 for p in conv.parameters()):
            left[name] = "shares a parameter with another layer, or the forward reads it"
        elif reason := check_foldable(conv, None):
            left[name] = reason
        else:
            norm = norms.get(node)
            bn = None if norm is None else modules[str(norm.target)]
            found[node] = Layer(name, norm or node, conv, bn, graph.normal_outputs)
            if not all(bool(torch.isfinite(part).all()) for part in found[node].folded()):
                todo = "Look at the training that made them."
                raise QATError(name, "NaN or Inf in its weights or statistics", "finite ones", todo)
    return found, list(left.items())
