"""Operations that work channel by channel: where they leave the channels, and whether a scale or a shift passes them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from qat.fold.convolution import is_plain
from qat.graph.kinds import argument, describe, is_averaging_node, keeps_scale, module_of
from qat.ptq.layer import Layer

HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU)
BENT = (nn.LeakyReLU, nn.PReLU)  # a negative slope may turn what is far below 0 into what is far above
_HOMOGENEOUS_FUNCTIONS: set[Any] = {F.relu, torch.relu, F.leaky_relu, F.prelu, torch.prelu, "relu", "leaky_relu", "prelu"}
RELUS: set[Any] = {F.relu, torch.relu, "relu"}
ALONE = ("Flatten Dropout Pool Upsample ZeroPad ReflectionPad ReplicationPad ConstantPad DropPath StochasticDepth DropBlock").split()
_ALONE_FUNCTIONS = "flatten reshape view squeeze contiguous clone detach mean pad interpolate pool".split()
_SHAPE_READERS = {"size", "dim", "shape"}


def is_relu6(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """A clip to [0, 6]; one to another interval is no ReLU6, by whatever name."""
    module = module_of(node, modules)
    if module is not None:
        return is_relu6_module(module)
    if node.target is F.hardtanh:
        return (argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)) == (0, 6)
    return node.target is F.relu6


def is_relu6_module(module: nn.Module) -> bool:
    return isinstance(module, nn.Hardtanh) and (module.min_val, module.max_val) == (0, 6)  # nn.ReLU6 is one


def channel_axis(layer: Layer, node: fx.Node) -> int:
    """Of the channels in a layer's input or output: the last one of a linear layer, else that before the positions."""
    return _rank(node) - 1 if isinstance(layer.conv, nn.Linear) else max(_rank(node) + 1 - layer.conv.weight.dim(), 0)


def is_homogeneous(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return isinstance(module_of(node, modules), HOMOGENEOUS) or (node.op != "call_module" and node.target in _HOMOGENEOUS_FUNCTIONS)


def moved_channels(node: fx.Node, source: fx.Node, axis: int, modules: dict[str, nn.Module]) -> tuple[int, int] | None:
    """(axis of the channels, features made of each) behind an operation that works channel by channel; None where it does not."""
    if not (keeps_scale(node, modules) or is_averaging_node(node, modules)):
        return None
    module = module_of(node, modules)
    name = type(module).__name__ if module is not None else getattr(node.target, "__name__", str(node.target))
    if not any(part in name for part in (ALONE if module is not None else _ALONE_FUNCTIONS)):
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


def no_shift_through(node: fx.Node, modules: dict[str, nn.Module]) -> str | None:
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


def no_shift_into(layer: Layer) -> str | None:
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


def is_named(module: nn.Module, parts: list[str]) -> bool:
    return any(part in type(module).__name__ for part in parts)


def reads_shape(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _SHAPE_READERS
    return node.op == "call_method" and node.target in _SHAPE_READERS


def _shape(node: fx.Node) -> tuple[int, ...] | None:
    shape = getattr(node.meta.get("tensor_meta"), "shape", None)
    return None if shape is None else tuple(shape)


def _rank(node: fx.Node) -> int:
    shape = _shape(node)
    return 0 if shape is None else len(shape)
