"""Where to clip the weights: the range of each layer at which the network's output suffers least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph.lifecycle import check_calibrated, folded_layers, modes_restored, set_fake_quant
from qat.graph.prepared import QuantGraph, each_batch, inputs_of
from qat.graph.stream import Stream
from qat.quant import FakeQuantizer
from qat.quant.affine import qparams
from qat.quant.fake_quantizer import LEARNED
from qat.quant.ranges import minmax

# Shares of the full range that are tried: halves and their roots down to 1/32.
RATIOS = tuple(2 ** (-k / 2) for k in range(11))


@torch.no_grad()
def search_weight_ranges(prepared: QuantGraph, batches: Iterable[Any], ratios: Sequence[float] = RATIOS) -> dict[str, float]:
    """Start learned weight scales where the output of the quantized network is nearest to the float network's.

    Layer by layer in graph order, the layers behind still float: the share of the largest weight to clip at is the one of least squared
    error of the network's outputs. A BatchNorm whose variance is near its eps gives filters many times the others' size that hardly
    change the output, so a range that covers them leaves the other filters one or two integers; an error measured on the weights
    themselves [WP21 eq. 16] cannot see that. The cost is about len(ratios) / 2 passes over `batches` a layer.

    Args:
        prepared: calibrated, with learned weight ranges ("lsq").
        batches: some dozens of pictures are enough.
        ratios: shares of the full range, largest first.

    Returns:
        the share of each layer by name, the largest of equals.

    Raises:
        QATError: no batches, or NaN in them; shares that are none; a network that is not calibrated; no layer whose weight range is
            learned: others follow the weights, a start would not last.
    """
    quantizers = {name: layer.weight_quantizer for name, layer in folded_layers(prepared).items() if layer.weight_quantizer is not None}
    if not any(quantizer.range == LEARNED for quantizer in quantizers.values()):
        ranges = ", ".join(sorted({quantizer.range for quantizer in quantizers.values()})) or "none"
        todo = "Prepare with weight_range='lsq'."
        raise QATError("search_weight_ranges", f"weight ranges {ranges}", f"'{LEARNED}', whose start can be chosen", todo)
    held = [inputs_of(prepared, batch) for batch in each_batch(batches)]
    if not held:
        raise QATError("search_weight_ranges", "no batches", "at least one batch of inputs", "Pass an iterable of tensors or tuples.")
    ratios = list(ratios)
    if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
        raise QATError("search_weight_ranges", f"ratios {ratios}", "shares of the full range, above 0 and at most 1", "Leave them out.")
    check_calibrated(prepared)
    switches = {m: m.enabled for m in prepared.modules() if isinstance(m, FakeQuantizer)}
    chosen: dict[str, float] = {}
    with modes_restored(prepared):
        prepared.eval()
        try:
            set_fake_quant(prepared, weights=False, activations=False)
            expected = [_tensors(prepared(*batch)) for batch in held]
            set_fake_quant(prepared, weights=False, activations=True)
            stream = Stream([prepared], held)
            for stop in stream:
                quantizer = stop.layers[0].weight_quantizer if stop.call == 0 else None
                if quantizer is not None:
                    quantizer.enabled = True
                    if quantizer.range == LEARNED:
                        chosen[stop.name] = _best(quantizer, stop.layers[0], stream, expected, ratios)
        finally:
            for module, enabled in switches.items():
                module.enabled = enabled
    return chosen


def _best(quantizer: FakeQuantizer, layer: FoldedConvBN, stream: Stream, expected: list[list[Tensor]], ratios: Sequence[float]) -> float:
    """Set the scale to the share of the full range with the least error, the first of equals."""
    weight = layer.weight_to_quantize()
    quantizer.initialize(weight)
    full = qparams(*minmax(weight, quantizer.spec, quantizer.axis), quantizer.spec)[0]
    errors = []
    for ratio in ratios:
        quantizer.scale.copy_(full * ratio)
        errors.append(sum(_error(outputs, wanted) for outputs, wanted in zip(stream.outputs(), expected)))
    if not all(math.isfinite(error) for error in errors):
        raise QATError(quantizer.name, "outputs with NaN or Inf", "finite outputs on these batches", "Leave the batches out.")
    best = ratios[errors.index(min(errors))]
    quantizer.scale.copy_(full * best)
    return best


def _error(outputs: Any, expected: list[Tensor]) -> float:
    """Squared error of the network's outputs."""
    return sum(float((one - other).double().square().sum()) for one, other in zip(_tensors(outputs), expected))


def _tensors(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor)]
