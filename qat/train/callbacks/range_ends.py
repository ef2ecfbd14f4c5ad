"""Where the grids of a network stand at this moment."""

import torch
from torch import Tensor, nn

from qat.fold import FoldedConvBN
from qat.quant import FakeQuantizer
from qat.quant.fake_quantizer import LEARNED
from qat.quant.learned import effective
from qat.train.callbacks.weight_codes import quantized_layers

ENDS = ("scale_low", "scale_high", "low", "high")


@torch.no_grad()
def range_ends(network: nn.Module) -> dict[str, Tensor]:
    """(4) by quantizer, on its device: the smallest and largest scale over channels, and the real numbers at the ends of the grid.

    Weights of folded layers: those of the folded weight as it would be shipped now. Quantizers that have no range yet are missing.
    """
    weights = {f"{name}.weight_quantizer": layer for name, layer in quantized_layers(network).items()}
    found = {}
    for name, quantizer in network.named_modules():
        if not isinstance(quantizer, FakeQuantizer) or not (name in weights or quantizer.initialized):
            continue
        zero = effective(quantizer.scale, quantizer.zero_point, quantizer.spec)[1] if quantizer.range == LEARNED else quantizer.zero_point
        scale = _shipped_scale(weights[name]) if name in weights else quantizer.current_scale()
        ends = ((quantizer.spec.qmin - zero) * scale).amin(), ((quantizer.spec.qmax - zero) * scale).amax()
        found[name] = torch.stack((scale.amin(), scale.amax(), *ends)).float()
    return found


def _shipped_scale(layer: FoldedConvBN) -> Tensor:
    """Scale of the folded weight in inference; in training the layer would tell that of its last forward."""
    quantizer = layer.weight_quantizer
    training, quantizer.training = quantizer.training, False
    try:
        return layer.weight_scale()
    finally:
        quantizer.training = training
