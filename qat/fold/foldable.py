"""Which BatchNorms can be folded into which layers, and why the others cannot."""

from typing import Any

from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d
from timm.layers.norm_act import SyncBatchNormAct
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized
from torchvision.ops.misc import FrozenBatchNorm2d

from qat.fold.convolution import is_plain
from qat.fold.probe import adds_bias, is_linear_in_input, is_linear_in_weight, out_channels

FROZEN_NORMS = (FrozenBatchNorm2d, FrozenBatchNormAct2d)
_KNOWN_FORWARDS = {kind.forward for kind in (_BatchNorm, nn.SyncBatchNorm, BatchNormAct2d, SyncBatchNormAct, *FROZEN_NORMS)}


def check_foldable(conv: nn.Module, bn: nn.Module | None) -> str | None:
    """Why `bn` cannot be folded into `conv`, or None when it can.

    Looks at the two modules only; that bn reads nothing but conv's output is the caller's to know.

    Args:
        bn: None asks whether the layer alone can be run with other weights.
    """
    return _check_layer(conv) or (None if bn is None else _check_norm(bn) or _check_pair(conv, bn))


def has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def has_known_forward(bn: nn.Module) -> bool:
    """Whether the forward is batch normalization as torch, timm or torchvision write it."""
    return type(bn).forward in _KNOWN_FORWARDS and "forward" not in bn.__dict__


def _check_layer(conv: nn.Module) -> str | None:
    kind = type(conv).__name__
    if not isinstance(conv, (_ConvNd, nn.Linear)):
        return f"{kind} is not a convolution or linear layer"
    if is_parametrized(conv) or not isinstance(conv._parameters.get("weight"), Tensor):
        return f"the weight of this {kind} is computed from other parameters (weight_norm, spectral_norm, a parametrization)"
    if has_hooks(conv):
        return f"this {kind} has forward hooks, which would see other values or none"
    if is_plain(conv):
        return None
    if others := [name for name, _ in conv.named_parameters() if name not in ("weight", "bias")]:
        return f"this {kind} has parameters besides weight and bias ({', '.join(others[:3])})"
    try:
        linear = is_linear_in_weight(conv, conv.weight) and is_linear_in_input(conv, conv.weight)
        biased = conv.bias is None or adds_bias(conv, conv.weight)
    except Exception as error:
        return f"the forward of this {kind} could not be run on one tensor with other weights ({type(error).__name__}: {error})"
    if not linear:
        return f"the forward of this {kind} is not linear in its weight and its input"
    return None if biased else f"the forward of this {kind} does not add its bias to its output as it is"


def _check_norm(bn: nn.Module) -> str | None:
    kind = type(bn).__name__
    if not isinstance(bn, (_BatchNorm, *FROZEN_NORMS)):
        return f"{kind} is not a BatchNorm"
    if not has_known_forward(bn):
        return f"{kind} has a forward of its own, which may not be batch normalization"
    if bn.running_mean is None or bn.running_var is None or not getattr(bn, "track_running_stats", True):
        return f"{kind} has no running statistics (track_running_stats=False): it normalises with each batch also in eval"
    if has_hooks(bn):
        return f"this {kind} has forward hooks, which a folded BatchNorm would never call"
    if is_parametrized(bn):
        return f"the weight of this {kind} is computed from other parameters; remove the parametrization first"
    return None


def _check_pair(conv: nn.Module, bn: Any) -> str | None:
    channels, features = out_channels(conv), bn.running_mean.numel()
    return None if channels == features else f"the layer gives {channels} channels and the BatchNorm has {features}"
