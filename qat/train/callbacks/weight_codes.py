"""The integer weight codes of training forwards, watched without changing them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat.fold import FoldedConvBN
from qat.fold.arithmetic import fold_weight, out_first
from qat.quant import FakeQuantizer
from qat.quant.affine import along, quantize


def quantized_layers(network: nn.Module) -> dict[str, FoldedConvBN]:
    """Layers whose weights have a quantizer of this package, by qualified name in the order of the network."""
    found = {name: m for name, m in network.named_modules() if isinstance(m, FoldedConvBN)}
    return {name: layer for name, layer in found.items() if isinstance(layer.weight_quantizer, FakeQuantizer)}


class WeightCodes:
    """What the weight quantizers of `layers` do in the forwards from here to `close`; of several calls of a layer the last one counts.

    A forward computes the same bits with it and without. Everything stays on the device.

    Args:
        sigmas: of an earlier forward (`used`), by layer; None where no statistics reach the codes.

    Attributes:
        codes: int16, (C_out, C_in/g, *k), less the zero point, as the forward used them. Layers whose quantizer is off are missing.
        as_before: codes of the same float weights, folded with the layer's `sigmas` instead.
    """

    def __init__(self, layers: Mapping[str, FoldedConvBN], sigmas: Mapping[str, Tensor | None]):
        self.layers = layers
        self.codes: dict[str, Tensor] = {}
        self.as_before: dict[str, Tensor] = {}
        self._sigmas, self._running = sigmas, dict[str, Tensor]()
        self._handles = [layer.weight_quantizer.register_forward_hook(self._watch(name)) for name, layer in layers.items()]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def used(self) -> dict[str, Tensor | None]:
        """sigma that each layer in `codes` folded with. Ask before anything else moves the batch's statistics."""
        found = {name: self.layers[name].quantized_under(self._running[name]) if name in self._running else None for name in self.codes}
        return {name: None if value is None else value.clone() for name, value in found.items()}

    def _watch(self, name: str) -> Any:
        layer = self.layers[name]

        @torch.no_grad()
        def hook(quantizer: FakeQuantizer, inputs: Any, output: Tensor) -> None:
            if not quantizer.enabled:
                return
            self.codes[name] = _steps_of(output, quantizer)
            if layer.keeps_bn:
                self._running[name] = layer.sigma.clone()
            sigma = self._sigmas.get(name)
            if sigma is not None:
                weight = fold_weight(out_first(layer.conv.weight, layer.conv), layer.gamma, sigma.to(output.device))
                scale, zero = quantizer.qparams_for(weight)
                codes = quantize(weight, scale, zero, quantizer.spec, quantizer.axis) - along(zero, weight, quantizer.axis)
                self.as_before[name] = codes.to(torch.int16)

        return hook


def _steps_of(values: Tensor, quantizer: FakeQuantizer) -> Tensor:
    """The whole numbers, int16, behind a quantizer's last output. A code times the scale is nearest to no other multiple of it."""
    scale = quantizer.current_scale().to(values.dtype)
    return (values / along(scale, values, quantizer.axis)).round().to(torch.int16)


def changed(codes: Tensor | None, before: Tensor | None) -> Tensor | None:
    """Share of the codes that differ, (), on their device; None where one is missing."""
    if codes is None or before is None:
        return None
    return (codes != before.to(codes.device)).float().mean()
