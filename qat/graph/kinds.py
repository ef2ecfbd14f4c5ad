"""What kind of thing a module or a graph node is: normalisation, weighted layer, activation, scale-keeping operation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import FrozenBatchNormAct2d
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrizations
from torchvision.ops.misc import FrozenBatchNorm2d

BATCH_NORMS = (_BatchNorm, FrozenBatchNorm2d, FrozenBatchNormAct2d)
INPUT_NORMS = (nn.LayerNorm, nn.GroupNorm, _InstanceNorm, nn.LocalResponseNorm, nn.RMSNorm)
WEIGHTED = (_ConvNd, nn.Linear)

_ACTIVATION_MODULES = (
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.GELU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.Mish,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softplus,
)
_ACTIVATION_NAMES = (
    "relu relu6 hardtanh hardswish hardsigmoid silu gelu leaky_relu prelu elu celu selu mish sigmoid tanh softplus clamp clip".split()
)


def _functions(names: Iterable[str]) -> set[Any]:
    return {getattr(space, name) for space in (torch, F) for name in names if hasattr(space, name)}


_ACTIVATION_FUNCTIONS = _functions(_ACTIVATION_NAMES)

_CLIP_MODULES = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
_CLIP_NAMES = {"relu", "relu6", "hardtanh", "clamp", "clip"}
_CLIP_FUNCTIONS = _functions(_CLIP_NAMES)

# One grid describes the output of these as well as the input: they move, select or drop values, zero included.
_KEEPING_MODULES = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.PixelShuffle,
    nn.PixelUnshuffle,
    nn.ChannelShuffle,
    nn.ZeroPad1d,
    nn.ZeroPad2d,
    nn.ZeroPad3d,
    nn.ReflectionPad1d,
    nn.ReflectionPad2d,
    nn.ReflectionPad3d,
    nn.ReplicationPad1d,
    nn.ReplicationPad2d,
    nn.ReplicationPad3d,
    nn.UpsamplingNearest2d,
)
_KEEPING_FUNCTIONS: set[Any] = {
    torch.flatten,
    torch.reshape,
    torch.transpose,
    torch.permute,
    torch.squeeze,
    torch.unsqueeze,
    torch.split,
    torch.chunk,
    torch.narrow,
    torch.unbind,
    torch.roll,
    torch.flip,
    torch.amax,
    operator.getitem,
    getattr,
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
    F.adaptive_max_pool3d,
    F.pixel_shuffle,
    F.pixel_unshuffle,
    F.channel_shuffle,
}
_KEEPING_METHODS = set(
    "view reshape flatten transpose permute contiguous squeeze unsqueeze expand expand_as chunk split unbind narrow flip roll "
    "repeat view_as reshape_as t type_as clone detach amax unflatten".split()
)

_AVERAGING_MODULES = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.Upsample,
    nn.UpsamplingBilinear2d,
)
_AVERAGING_FUNCTIONS = _functions("mean interpolate avg_pool1d avg_pool2d avg_pool3d".split()) | _functions(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d".split()
)
FUNCTIONAL_NORMS = ("batch_norm", "layer_norm", "group_norm", "instance_norm")
FUNCTIONAL_LAYERS = tuple("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d linear".split())
_SOFTMAXES = _functions(["softmax"])
_CONCATENATIONS = _functions("cat concat concatenate".split())


def is_input_norm(module: nn.Module) -> bool:
    """A normalisation whose statistics depend on each input, so that it is no fixed affine map."""
    if isinstance(module, INPUT_NORMS):
        return True
    # weight_norm's and spectral_norm's parametrizations are named so too, and read no input.
    unknown = next(module.children(), None) is None and type(module).__module__ != parametrizations.__name__
    return unknown and "Norm" in type(module).__name__ and not isinstance(module, BATCH_NORMS)


def is_drop_path(module: nn.Module) -> bool:
    return type(module).__name__ in ("DropPath", "StochasticDepth", "DropBlock2d")


def is_activation(module: nn.Module) -> bool:
    return isinstance(module, _ACTIVATION_MODULES) or type(module).__module__.startswith("timm.layers.activations")


def module_of(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    """The module a node calls, or None for functions, methods and inputs."""
    return modules[str(node.target)] if node.op == "call_module" else None


def is_activation_node(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        module = modules[str(node.target)]
        return is_activation(module) or (isinstance(module, nn.Sequential) and len(module) > 0 and is_activation(module[-1]))
    if node.op == "call_method":
        return str(node.target) in _ACTIVATION_NAMES
    return node.op == "call_function" and node.target in _ACTIVATION_FUNCTIONS


def is_clip_node(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """An activation that only limits values, which integer kernels do on the integers."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _CLIP_MODULES)
    if node.op == "call_method":
        return str(node.target) in _CLIP_NAMES
    return node.op == "call_function" and node.target in _CLIP_FUNCTIONS


def keeps_scale(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether the node's output lies on the grid of its first input, so that it needs no quantizer of its own."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        if isinstance(module, nn.Upsample):
            return module.mode == "nearest"
        if isinstance(module, (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)):
            return module.value == 0
        return isinstance(module, _KEEPING_MODULES) or is_drop_path(module)
    if node.op == "call_method":
        return str(node.target) in _KEEPING_METHODS
    if node.op != "call_function":
        return False
    if is_taken_out(node):
        return keeps_scale(node.all_input_nodes[0], modules)
    if node.target is F.interpolate:
        return argument(node, 3, "mode", "nearest") in ("nearest", "nearest-exact")
    if node.target is F.pad:
        return argument(node, 2, "mode", "constant") != "constant" or argument(node, 3, "value", None) in (None, 0)
    return node.target in _KEEPING_FUNCTIONS


def is_taken_out(node: fx.Node) -> bool:
    """An item or attribute of a tuple, mapping or object: a tensor of its own, where that of a tensor is a part of it."""
    if node.op != "call_function" or node.target not in (operator.getitem, getattr) or not isinstance(node.args[0], fx.Node):
        return False
    return not hasattr(node.args[0].meta.get("tensor_meta"), "dtype")


def is_averaging_node(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Average pools, means and interpolation: weighted averages of their one input."""
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], _AVERAGING_MODULES)
    return node.target == "mean" if node.op == "call_method" else node.op == "call_function" and node.target in _AVERAGING_FUNCTIONS


# What an operation on two tensors, or a tensor and a number, is called.
_ARITHMETIC: dict[Any, str] = {
    **dict.fromkeys((operator.add, torch.add, "add"), "add"),
    **dict.fromkeys((operator.sub, torch.sub, torch.subtract, "sub"), "sub"),
    **dict.fromkeys((operator.mul, torch.mul, torch.multiply, "mul"), "mul"),
    **dict.fromkeys((operator.truediv, torch.div, torch.divide, "div"), "div"),
    **dict.fromkeys((operator.neg, torch.neg, torch.negative, "neg"), "neg"),
}


def arithmetic_of(node: fx.Node) -> str | None:
    """add, sub, mul, div or neg; None for any other node, and for one with options (alpha, rounding_mode)."""
    return _ARITHMETIC.get(node.target) if node.op in ("call_function", "call_method") and not node.kwargs else None


def is_softmax_node(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], (nn.Softmax, nn.Softmax2d))
    return node.target == "softmax" if node.op == "call_method" else node.op == "call_function" and node.target in _SOFTMAXES


def is_concatenation_node(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _CONCATENATIONS


def argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def describe(node: fx.Node, modules: dict[str, nn.Module]) -> str:
    """A node in the words of an error message or reason."""
    if node.op == "placeholder":
        return f"the network's input '{node.target}'"
    if node.op == "call_module":
        return f"'{node.target}' ({type(modules[str(node.target)]).__name__})"
    target: Callable[..., Any] | str = node.target
    return f"the operation '{target if isinstance(target, str) else target.__name__}'"
