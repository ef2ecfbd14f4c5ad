"""Which layers read each other's channels through operations that a scale per channel, or a shift, passes.

A positive factor passes what is positively homogeneous and keeps channels apart: ReLU, LeakyReLU, PReLU, pools, means over positions,
flattening, resizing. ReLU6 is not; the clips on the way are noted. A shift needs more: padding with zeros would not shift along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from qat.fold.base import built_in_activation
from qat.fold.convolution import is_plain
from qat.graph.kinds import argument, describe, is_averaging_node, keeps_scale, module_of
from qat.ptq.layer import Layer

_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
_BENT = (nn.LeakyReLU, nn.PReLU)  # a negative slope may turn what is far below 0 into what is far above
_HOMOGENEOUS_FUNCTIONS: set[Any] = {F.relu, torch.relu, F.leaky_relu, F.prelu, torch.prelu, "relu", "leaky_relu", "prelu"}
_RELUS: set[Any] = {F.relu, torch.relu, "relu"}
_ALONE = ("Flatten Dropout Pool Upsample ZeroPad ReflectionPad ReplicationPad ConstantPad DropPath StochasticDepth DropBlock").split()
_ALONE_FUNCTIONS = "flatten reshape view squeeze contiguous clone detach mean pad interpolate pool".split()
_SHAPE_READERS = {"size", "dim", "shape"}


@dataclass(eq=False)
class Link:
    """`second` reads nothing but `first`, channel by channel.

    Attributes:
        repeat: inputs of `second` that are made of each channel of `first`, one behind the other (flattened positions).
        clips: nodes on the way that are ReLU6; the node of the BatchNorm stands for one built into it.
        gives_zero: an activation on the way leaves no negative values.
        bounded: in front of the clips no value gets larger than the layer gave it.
        no_shift: why a shift of the channels does not pass, or None.
    """

    first: Layer
    second: Layer
    repeat: int = 1
    clips: list[fx.Node] = field(default_factory=list)
    gives_zero: bool = False
    bounded: bool = True
    no_shift: str | None = None

    @property
    def name(self) -> str:
        return f"{self.first.name} -> {self.second.name}"


def links_of(graph: fx.GraphModule, layers: dict[fx.Node, Layer]) -> tuple[list[Link], list[tuple[str, str]]]:
    """The links in graph order, and pairs (layer, what its output meets instead of another layer)."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    links: list[Link] = []
    left: list[tuple[str, str]] = []
    for layer in layers.values():
        found = _follow(layer, layers, modules)
        if isinstance(found, Link):
            links.append(found)
        else:
            left.append((layer.name, found))
    return links, left


def is_relu6(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A clip to [0, 6]; one to another interval is no ReLU6, by whatever name."""
    module = module_of(node, modules)
    if module is not None:
        return _is_relu6(module)
    if node.target is F.hardtanh:
        return (argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)) == (0, 6)
    return node.target is F.relu6


def _is_relu6(module: nn.Module) -> bool:
    return isinstance(module, nn.Hardtanh) and (module.min_val, module.max_val) == (0, 6)  # nn.ReLU6 is one


def _follow(layer: Layer, layers: dict[fx.Node, Layer], modules: dict[str, nn.Module]) -> Link | str:
    node, axis, repeat = layer.end, _axis(layer, layer.end), 1
    clips: list[fx.Node] = []
    gives_zero, grows, bounded, no_shift = False, False, True, None
    inside = built_in_activation(layer.bn)
    for part in inside if isinstance(inside, nn.Sequential) else (inside,):
        gives_zero, grows = gives_zero or isinstance(part, nn.ReLU), grows or isinstance(part, _BENT)
        if _is_relu6(part):
            clips.append(node)
            bounded = bounded and not grows
        elif not isinstance(part, (*_HOMOGENEOUS, nn.Identity)) and not _is_named(part, _ALONE):
            return f"its BatchNorm's activation ({type(part).__name__}) is not positively homogeneous"
    while True:
        readers = [user for user in node.users if not _reads_shape(user)]
        if len(readers) != 1:
            return f"its output is read by {', '.join(describe(user, modules) for user in readers)}"
        (reader,) = readers
        if reader.op == "output":
            return "its output is the network's"
        if reader.all_input_nodes[0] is not node or (reader.args and reader.args[0] is not node):
            return f"its output is not the first input of {describe(reader, modules)}"
        second = layers.get(reader)
        if second is not None:
            if axis != _axis(second, node):
                return f"its channels are not those that '{second.name}' reads"
            return Link(layer, second, repeat, clips, gives_zero or bool(clips), bounded, no_shift or _no_shift_into(second))
        gives_zero = gives_zero or isinstance(module_of(reader, modules), nn.ReLU) or reader.target in _RELUS
        if is_relu6(reader, modules):
            clips.append(reader)
            bounded = bounded and not grows
        elif not _is_homogeneous(reader, modules):
            moved = _moved(reader, node, axis, modules)
            if moved is None:
                return f"its output is read by {describe(reader, modules)}"
            axis, repeat = moved[0], repeat * moved[1]
            no_shift = no_shift or _no_shift_through(reader, modules)
        grows = grows or not (keeps_scale(reader, modules) or (gives_zero and _is_homogeneous(reader, modules)))
        node = reader


def _axis(layer: Layer, node: fx.Node) -> int:
    """Of the channels in a layer's input or output: the last one of a linear layer, else that before the positions."""
    return _rank(node) - 1 if isinstance(layer.conv, nn.Linear) else max(_rank(node) + 1 - layer.conv.weight.dim(), 0)


def _is_homogeneous(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return isinstance(module_of(node, modules), _HOMOGENEOUS) or (node.op != "call_module" and node.target in _HOMOGENEOUS_FUNCTIONS)


def _moved(node: fx.Node, source: fx.Node, axis: int, modules: dict[str, nn.Module]) -> tuple[int, int] | None:
    """(axis of the channels, features made of each) behind an operation that works channel by channel; None where it does not."""
    if not (keeps_scale(node, modules) or is_averaging_node(node, modules)):
        return None
    module = module_of(node, modules)
    name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
    if not any(part in name for part in (_ALONE if module is not None else _ALONE_FUNCTIONS)):
        return None
    before, after = _shape(source), _shape(node)
    if before is None or after is None or axis >= len(before):
        return None
    if _positions(node, name, len(before)) > len(before) - 1 - axis:
        return None
    if name == "mean":
        return _axis_of_mean(node, len(before), axis)
    if axis < len(after) and before[: axis + 1] == after[: axis + 1]:
        return axis, 1
    flat = (*before[:axis], math.prod(before[axis:]))
    flattens = "Flatten" in name or name in ("flatten", "reshape", "view")
    return (axis, flat[axis] // before[axis]) if flattens and after == flat else None


def _positions(node: fx.Node, name: str, rank: int) -> int:
    """How many trailing axes a pool, a pad or a resizing works on; 0 for any other operation."""
    if "psample" in name or name == "interpolate":
        return rank - 2
    if name == "pad":
        return len(argument(node, 1, "pad", ())) // 2
    if "pool" in name.lower() or "Pad" in name:
        return next((int(digit) for digit in "123" if f"{digit}d" in name), rank)
    return 0


def _axis_of_mean(node: fx.Node, rank: int, axis: int) -> tuple[int, int] | None:
    dims = argument(node, 1, "dim", None)
    if dims is None:
        return None
    over = {int(d) % rank for d in (dims if isinstance(dims, (tuple, list)) else (dims,))}
    if axis in over or 0 in over:
        return None
    return (axis if argument(node, 2, "keepdim", False) else axis - sum(d < axis for d in over)), 1


def _no_shift_through(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
    """Why a shift does not pass an operation: it brings zeros in, or its weights have another sum than 1."""
    module = module_of(node, modules)
    divisor = argument(node, 6, "divisor_override", None) if module is None else getattr(module, "divisor_override", None)
    if is_averaging_node(node, modules) and divisor is not None:
        return f"{describe(node, modules)} divides by another number"
    if module is not None:
        zeros = isinstance(module, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d))
        averaged = isinstance(module, (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)) and _any(module.padding)
        return f"{describe(node, modules)} pads with zeros" if zeros or averaged else None
    name = getattr(node.target, "__name__", str(node.target))
    if name == "pad" and argument(node, 2, "mode", "constant") == "constant":
        return "F.pad pads with zeros"
    averages = "avg_pool" in name and "adaptive" not in name
    return "an average pool pads with zeros" if averages and _any(argument(node, 3, "padding", 0)) else None


def _no_shift_into(layer: Layer) -> str | None:
    conv = layer.conv
    if isinstance(conv, nn.Linear):
        return None
    if conv.transposed and (set(conv.kernel_size) | set(conv.stride) != {1} or _any(conv.padding) or _any(conv.output_padding)):
        return f"'{layer.name}' is transposed: not every output sees all of its weights"
    pointwise = set(conv.kernel_size) == {1}
    pads = conv.padding_mode == "zeros" and _any(conv.padding) and not (pointwise and conv.padding == "same")
    if pads or not (pointwise or is_plain(conv)):
        return f"'{layer.name}' pads with zeros"
    return None


def _any(padding: Any) -> bool:
    return padding != "valid" if isinstance(padding, str) else any(padding) if isinstance(padding, (tuple, list)) else bool(padding)


def _is_named(module: nn.Module, parts: list[str]) -> bool:
    return any(part in type(module).__name__ for part in parts)


def _reads_shape(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _SHAPE_READERS
    return node.op == "call_method" and node.target in _SHAPE_READERS


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _rank(node: fx.Node) -> int:
    shape = _shape(node)
    return 0 if shape is None else len(shape)


def spread(values: Tensor, repeat: int) -> Tensor:
    """A value per channel (C) as one per feature (C repeat), in the order of flattening."""
    return values.repeat_interleave(repeat)
