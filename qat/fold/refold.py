"""Another strategy for a layer in the middle of its life, with the same inference function."""

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.fold.arithmetic import at_least_float32, out_first
from qat.fold.base import FoldedConvBN
from qat.fold.scale_merge import ScaleMerge
from qat.fold.static import Static
from qat.fold.strategies import STRATEGIES
from qat.quant import FakeQuantizer
from qat.quant.affine import qparams
from qat.quant.fake_quantizer import LEARNED


def refold(module: FoldedConvBN, strategy: str, **options: Any) -> FoldedConvBN:
    """A layer with the same inference function that trains by `strategy`.

    Shares conv, bn and quantizer with `module`, which is to be thrown away; static gets parameters of its own. To and from scale_merge,
    which quantizes W where the others quantize gamma W / sigma, a scale that is held, learned or running is converted, in a copy of the
    quantizer. A static layer asked for static is returned as it is.

    Args:
        options: keyword arguments of the strategy.

    Raises:
        QATError: unknown strategy; from static to another; to scale_merge with a per-tensor scale; to or from scale_merge with a negative
            gamma on a grid that is not symmetric and narrow.
    """
    where = module.name or type(module).__name__
    if strategy not in STRATEGIES:
        raise QATError(where, repr(strategy), " | ".join(STRATEGIES), "Correct the name of the strategy.")
    if isinstance(module, Static):
        if strategy == Static.strategy:
            return module
        raise QATError(
            where,
            f"strategy 'static' to be turned into '{strategy}'",
            "a layer that still has its BatchNorm",
            "A fold is not undone: prepare the float model again with the other strategy.",
        )
    kind = STRATEGIES[strategy]
    quantizer = module.weight_quantizer
    if isinstance(module, ScaleMerge) != (kind is ScaleMerge):
        if isinstance(module, ScaleMerge):
            module.check_signs()
        quantizer = _converted(module, quantizer)
    refolded = kind(module.conv, module.bn, quantizer, **options)
    refolded.activation, refolded.name = module.activation, module.name
    refolded.set_input_quantizer(module.input_quantizer)
    if (change := module.bias_change()) is not None:
        bias = attrgetter(refolded.bias_key)(refolded).detach()
        refolded.bias_correction = module.bias_correction if refolded.keeps_bn else torch.stack((bias - change, bias))
    refolded.frozen = refolded.always_frozen or (module.frozen and not module.always_frozen)
    return refolded.train(module.training)


@torch.no_grad()
def _converted(module: FoldedConvBN, quantizer: nn.Module | None) -> nn.Module | None:
    """The quantizer with its scales multiplied by |gamma / sigma| when it leaves scale_merge, and divided by it when it enters."""
    if not isinstance(quantizer, FakeQuantizer) or not quantizer.spec.per_channel or not _holds_scale(quantizer):
        return quantizer
    quantizer = copy.deepcopy(quantizer)
    factor = at_least_float32(module.gamma) / module.sigma
    dead = factor.abs() < torch.finfo(factor.dtype).tiny
    magnitude = torch.where(dead, 1.0, factor.abs())
    if isinstance(module, ScaleMerge):
        quantizer.scale.mul_(magnitude)
        quantizer.extent.copy_(_scaled(quantizer.extent, factor, magnitude))
        return quantizer
    # A channel with gamma = 0 has codes 0 and a scale that says nothing of W: it gets the range of its W.
    weight = at_least_float32(out_first(module.conv.weight, module.conv)).flatten(1)
    low, high = weight.amin(1), weight.amax(1)
    quantizer.scale.copy_(torch.where(dead, qparams(low, high, quantizer.spec)[0], quantizer.scale / magnitude))
    quantizer.extent.copy_(torch.where(dead, torch.stack((-low, high)), _scaled(quantizer.extent, factor, magnitude.reciprocal())))
    return quantizer


def _holds_scale(quantizer: FakeQuantizer) -> bool:
    """Whether the next call uses a scale kept from before, not the range of its tensor."""
    return quantizer.initialized and (quantizer.range == LEARNED or quantizer.running or not quantizer.observing)


def _scaled(extent: Tensor, factor: Tensor, magnitude: Tensor) -> Tensor:
    """stack(-lo, hi), (2, C), of a tensor multiplied by sign(factor) magnitude."""
    return torch.where(factor < 0, extent.flip(0), extent) * magnitude
