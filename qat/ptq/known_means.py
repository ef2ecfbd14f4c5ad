"""What the BatchNorms of a network say of its tensors: the mean of every channel, without data [DFQ sect. 4.2; WP21 sect. 3.3].

A BatchNorm's output is taken for normal, N(beta, gamma^2), at every position alike: the zeros of a padding are ignored, as in the papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.fold import FoldedConvBN
from qat.fold.base import built_in_activation
from qat.fold.normal_output import layer_output, normal_output
from qat.graph.kinds import (
    argument,
    arithmetic_of,
    describe,
    is_activation_node,
    is_averaging_node,
    is_concatenation_node,
    is_drop_path,
    module_of,
)
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.place import NextInput
from qat.graph.prepared import QuantGraph
from qat.ptq.expectation import expected_clip, expected_leaky_relu
from qat.quant import FakeQuantizer

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_PASSING = (FakeQuantizer, NextInput, nn.Identity, *_DROPOUTS)
_PADDING = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_RESHAPING_MODULES = (nn.Flatten,)
_RESHAPING_FUNCTIONS = (torch.flatten, torch.reshape, torch.squeeze)
_RESHAPING_METHODS = ("flatten", "reshape", "view", "squeeze", "contiguous")


@dataclass(frozen=True)
class Known:
    """Of a tensor (N, C, *): the mean of each channel, (C) in float64, and for a normal one the standard deviation."""

    mean: Tensor
    std: Tensor | None = None


def known_means(prepared: QuantGraph) -> dict[fx.Node, Known | str]:
    """For each tensor of the float function what is known of it, or the reason why nothing is."""
    modules = dict(prepared.named_modules(remove_duplicate=False))
    found: dict[fx.Node, Known | str] = {}
    for node in prepared.graph.nodes:
        found[node] = _known(node, modules, found, prepared)
    return found


def _known(node: fx.Node, modules: dict[str, nn.Module], found: dict[fx.Node, Known | str], prepared: QuantGraph) -> Known | str:
    module, name = module_of(node, modules), describe(node, modules)
    if isinstance(module, FoldedConvBN):
        return _of_layer(module, str(node.target), prepared)
    if isinstance(module, LeftBatchNorm):
        if module.bn.running_var is None:
            return f"{name} normalises with each batch"
        return _activated(built_in_activation(module.bn), Known(*(t.double() for t in normal_output(module.bn))), name)
    sources = [found[source] for source in node.all_input_nodes]
    if not sources:
        return f"nothing is known of {name}"
    if reasons := [source for source in sources if isinstance(source, str)]:
        return reasons[0]
    known = [source for source in sources if isinstance(source, Known)]
    if is_concatenation_node(node):
        parts = [found[part] for part in argument(node, 0, "tensors", ())]  # one of them may stand there twice
        return _concatenated(parts) if argument(node, 1, "dim", 0) in (1, 1 - len(_shape(node))) else f"{name} is not over the channels"
    if arithmetic_of(node) in ("add", "sub"):
        return _summed(node, known, name)
    if len(known) != 1:
        return f"the mean behind {name} does not follow from those of its inputs"
    if isinstance(module, _PASSING) or (module is not None and is_drop_path(module)) or _pads_zeros(node, module):
        return known[0]
    if not all(hasattr(near.meta.get("tensor_meta"), "shape") for near in (node, *node.all_input_nodes)):
        return f"the shapes around {name} are not known"
    if is_activation_node(node, modules):
        return _activated(_activation(node, module), known[0], name)
    if is_averaging_node(node, modules):
        return _averaged(node, module, known[0], name)
    if isinstance(module, _RESHAPING_MODULES) or node.target in (*_RESHAPING_FUNCTIONS, *_RESHAPING_METHODS):
        return _reshaped(node, known[0], name)
    return f"{name} does not keep the mean"


def _of_layer(layer: FoldedConvBN, name: str, prepared: QuantGraph) -> Known | str:
    if layer.bn is not None:
        return Known(*(t.double() for t in layer_output(layer)))
    if name in prepared.normal_outputs:
        return Known(*(t.double() for t in prepared.normal_outputs[name]))
    return f"'{name}' has no BatchNorm"


def _activation(node: fx.Node, module: nn.Module | None) -> nn.Module | None:
    """The module that computes what a node computes; None for other activations, and for limits that are tensors."""
    if module is not None:
        return module
    name = node.target if isinstance(node.target, str) else node.target.__name__
    match name:
        case "relu":
            return nn.ReLU()
        case "relu6":
            return nn.ReLU6()
        case "hardtanh":
            return nn.Hardtanh(argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0))
        case "leaky_relu":
            return nn.LeakyReLU(argument(node, 1, "negative_slope", 0.01))
        case "clamp" | "clip":
            ends: Any = argument(node, 1, "min", None), argument(node, 2, "max", None)
            if not any(isinstance(end, fx.Node) for end in ends):
                # Hardtanh refuses ends that torch.clamp takes.
                return _Clip(*(open_end if end is None else float(end) for end, open_end in zip(ends, (-math.inf, math.inf))))
    return None


class _Clip(nn.Module):
    def __init__(self, min_val: float, max_val: float):
        super().__init__()
        self.min_val, self.max_val = min_val, max_val


def _activated(activation: nn.Module | None, x: Known, name: str) -> Known | str:
    """The mean behind an activation of a normal tensor."""
    if isinstance(activation, nn.Sequential):  # a dropout or none, then the activation
        *before, activation = activation
        if not all(isinstance(part, _PASSING) for part in before):
            return f"nothing is known of what {name} does before its activation"
    if type(activation) is nn.Identity:
        return x
    if x.std is None:
        return f"the input of {name} is not that of a BatchNorm alone"
    mean, std = x.mean, x.std
    match activation:
        case nn.ReLU():
            return Known(expected_clip(mean, std, lo=0.0))
        case nn.Hardtanh() | _Clip():  # nn.ReLU6 is one
            return Known(expected_clip(mean, std, float(activation.min_val), float(activation.max_val)))
        case nn.LeakyReLU():
            return Known(expected_leaky_relu(mean, std, activation.negative_slope))
        case nn.PReLU():
            return Known(expected_leaky_relu(mean, std, activation.weight.detach().double()))
    return f"the mean behind {name} has no closed form here"


def _averaged(node: fx.Node, module: nn.Module | None, x: Known, name: str) -> Known | str:
    options = {"padding": (3, 0), "count_include_pad": (5, True), "divisor_override": (6, None)}
    if module is not None:
        padding, counted, divisor = (getattr(module, key, default) for key, (_, default) in options.items())
    elif getattr(node.target, "__name__", "").startswith("avg_pool"):
        padding, counted, divisor = (argument(node, at, key, default) for key, (at, default) in options.items())
    else:
        padding, counted, divisor = 0, True, None
    if divisor is not None:
        return f"{name} divides by another number"
    if counted and any(padding if isinstance(padding, (tuple, list)) else (padding,)):
        return f"{name} averages zeros of its padding as well"
    source, shape = _shape(node.all_input_nodes[0]), _shape(node)
    if getattr(node.target, "__name__", node.target) == "mean":
        dims = argument(node, 1, "dim", None)
        dims = [d % len(source) for d in (dims if isinstance(dims, (tuple, list)) else [dims])] if dims is not None else [0]
        if any(d < 2 for d in dims):
            return f"{name} is not over positions alone"
    return Known(x.mean) if shape[:2] == source[:2] else f"{name} does not keep the channels"


def _reshaped(node: fx.Node, x: Known, name: str) -> Known | str:
    """(N, C, *) with other positions, or with the positions of each channel as features."""
    source, shape = _shape(node.all_input_nodes[0]), _shape(node)
    if len(shape) < 2 or shape[0] != source[0]:
        return f"{name} mixes pictures"
    positions = math.prod(source[2:])
    if shape[1] == source[1]:
        return x
    if len(shape) == 2 and shape[1] == source[1] * positions:
        return Known(x.mean.repeat_interleave(positions), None if x.std is None else x.std.repeat_interleave(positions))
    return f"{name} mixes channels and positions"


def _summed(node: fx.Node, known: list[Known], name: str) -> Known | str:
    """The sum or difference of two known tensors, or of one and a number."""
    if any(_shape(source)[1:] != _shape(node)[1:] for source in node.all_input_nodes):
        return f"{name} spreads one of its inputs over the other"
    means: list[Any] = [known[node.all_input_nodes.index(a)].mean if isinstance(a, fx.Node) else a for a in node.args]
    if len(means) != 2 or not all(isinstance(mean, (Tensor, int, float)) for mean in means):
        return f"the mean behind {name} does not follow from those of its inputs"
    number = not all(isinstance(mean, Tensor) for mean in means)
    return Known(means[0] + means[1] if arithmetic_of(node) == "add" else means[0] - means[1], known[0].std if number else None)


def _concatenated(known: list[Any]) -> Known:
    stds = [one.std for one in known if one.std is not None]
    return Known(torch.cat([one.mean for one in known]), torch.cat(stds) if len(stds) == len(known) else None)


def _pads_zeros(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node adds zeros around the positions, which are ignored."""
    if isinstance(module, _PADDING):
        return getattr(module, "value", 0) == 0 and _shape(node)[:2] == _shape(node.all_input_nodes[0])[:2]
    if node.target is not F.pad or argument(node, 2, "mode", "constant") != "constant" or argument(node, 3, "value", None) not in (None, 0):
        return False
    return _shape(node)[:2] == _shape(node.all_input_nodes[0])[:2]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(getattr(node.meta.get("tensor_meta"), "shape", ()))
