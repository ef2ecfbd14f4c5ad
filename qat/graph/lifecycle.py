"""The life of a prepared network: collect ranges, switch quantization, freeze, re-estimate, change the strategy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qat.choose import check_name
from qat.errors import QATError
from qat.fold import STRATEGIES, FoldedConvBN
from qat.fold.normal_output import layer_output
from qat.fold.refold import refold as refold_layer
from qat.fold.rounded_away import describe_rounded_away, rounded_away
from qat.graph.kinds import BATCH_NORMS
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.place import QUANTIZERS, tell_layers_their_input
from qat.graph.prepared import QuantGraph, each_batch, inputs_of
from qat.quant import FakeQuantizer
from qat.quant.fake_quantizer import LEARNED


def activation_quantizers(prepared: nn.Module) -> dict[str, FakeQuantizer]:
    """Activation quantizers by qualified name, in graph order."""
    found = {n: m for n, m in prepared.named_modules() if isinstance(m, FakeQuantizer) and n.startswith(f"{QUANTIZERS}.")}
    if not found:
        raise QATError(type(prepared).__name__, "no activation quantizers", "a network from qat.prepare", "Call qat.prepare first.")
    return found


def folded_layers(prepared: nn.Module) -> dict[str, FoldedConvBN]:
    """Layers with quantized weights by qualified name."""
    return {n: m for n, m in prepared.named_modules() if isinstance(m, FoldedConvBN)}


def check_calibrated(prepared: nn.Module, switched_off: bool = True) -> None:
    """Raise QATError where an activation quantizer has seen no data; those of constants read them when they are called.

    Args:
        switched_off: ask it of quantizers that are switched off as well.
    """
    for name, quantizer in activation_quantizers(prepared).items():
        if (quantizer.enabled or switched_off) and quantizer.running and not quantizer.initialized:
            raise QATError(name, "no range yet", "a calibrated network", "Call qat.calibrate(prepared, batches) first.")


def calibrate(prepared: QuantGraph, batches: Iterable[Any]) -> None:
    """Collect activation ranges from data; weights and BatchNorm statistics do not move.

    Weights are quantized as they are set, activations stay float meanwhile. Batches with NaN or Inf are ignored layer by
    layer, with a warning that names the layers; so is each layer named whose one weight scale leaves channels without any weight.

    Args:
        batches: items are a tensor or a tuple of the model's positional inputs.

    Raises:
        QATError: no batches, or a layer that saw only NaN or Inf.
    """
    quantizers = activation_quantizers(prepared)
    enabled = {name: q.enabled for name, q in quantizers.items()}
    before = {name: (int(q.batches), int(q.nonfinite_batches)) for name, q in quantizers.items()}
    count = 0
    with modes_restored(prepared), torch.no_grad():
        prepared.eval()
        for quantizer in quantizers.values():
            quantizer.train()
            quantizer.enabled = False
        try:
            for batch in each_batch(batches):
                _run(prepared, batch)
                count += 1
        finally:
            for name, quantizer in quantizers.items():
                quantizer.enabled = enabled[name]
    if not count:
        raise QATError("calibrate", "no batches", "at least one batch of inputs", "Pass an iterable of tensors or tuples.")
    for quantizer in quantizers.values():
        _ = quantizer.initialized  # reads the device once, here, so that no later forward has to; a compiled one could not
    bad = [name for name, q in quantizers.items() if int(q.nonfinite_batches) > before[name][1]]
    unseen = [name for name in bad if int(quantizers[name].batches) == before[name][0]]
    if unseen:
        todo = "Look at the layer before it: the network gives NaN or Inf on this data."
        raise QATError(unseen[0], "only batches with NaN or Inf", "at least one finite batch", todo)
    if bad:
        warnings.warn(f"calibrate: NaN or Inf reached {', '.join(bad[:5])}; those batches were ignored for its range", stacklevel=2)
    for name, layer in folded_layers(prepared).items():
        # A learned scale has yet to be searched or trained.
        if layer.weight_quantizer is not None and layer.weight_quantizer.range != LEARNED and (channels := rounded_away(layer)):
            warnings.warn(describe_rounded_away(name, channels), stacklevel=2)


def set_fake_quant(prepared: QuantGraph, weights: bool = True, activations: bool = True) -> None:
    """Switch the fake quantization of all weights and of all activations on or off; ranges go on being observed."""
    for name, module in prepared.named_modules():
        if isinstance(module, FakeQuantizer):
            module.enabled = activations if name.startswith(f"{QUANTIZERS}.") else weights


def freeze_bn(prepared: QuantGraph) -> None:
    """Hold all BatchNorm statistics, folded or left; training goes on through the inference graph.

    Raises:
        QATError: a float network.
    """
    layers = [module for module in prepared.modules() if isinstance(module, (FoldedConvBN, LeftBatchNorm))]
    if not layers and any(isinstance(module, BATCH_NORMS) for module in prepared.modules()):
        raise QATError("freeze_bn", type(prepared).__name__, "a network from qat.prepare", "Call qat.prepare first.")
    for layer in layers:
        layer.freeze()


def freeze_ranges(prepared: QuantGraph, weights: bool = True, activations: bool = True) -> None:
    """Hold the ranges of activations, and of weights at what inference would use."""
    if activations:
        for quantizer in activation_quantizers(prepared).values():
            quantizer.freeze()
    if weights:
        for layer in folded_layers(prepared).values():
            layer.freeze_ranges()


def reestimate_bn(prepared: QuantGraph, batches: Iterable[Any]) -> None:
    """Replace BatchNorm statistics by those of `batches` through the quantized network, pooled over the batches.

    The pooled variance is that of all the data at once (law of total variance); averaging the batches' variances would lose
    the part between them. Each layer uses its strategy's own definition of batch statistics, and gives on what it will give with
    them, also when it is frozen. Source: [OSC] arXiv 2203.11086.

    What `qat.ptq.correct_bias` gave the biases stays, though statistics of the quantized network take the same shift out once more;
    `qat.ptq.reestimate_bn` takes it out first.

    Raises:
        QATError: no batches; batches that give NaN or Inf, which leave the statistics as they were.
    """
    named = [(name, m) for name, m in prepared.named_modules() if isinstance(m, (FoldedConvBN, LeftBatchNorm))]
    layers: list[Any] = [layer for _, layer in named]
    before = [{key: value.clone() for key, value in layer.bn.named_buffers()} if layer.bn is not None else {} for layer in layers]
    with modes_restored(prepared), torch.no_grad():
        prepared.eval()
        for layer in layers:
            layer.training = True
            layer.start_pooling()
            if isinstance(layer, LeftBatchNorm):
                layer.bn.train()
        count = 0
        try:
            for batch in each_batch(batches):
                _run(prepared, batch)
                count += 1
        finally:
            for layer in layers:
                layer.finish_pooling()
    if not count:
        raise QATError("reestimate_bn", "no batches", "at least one batch of inputs", "Pass an iterable of tensors or tuples.")
    bad = [name for name, layer in named if layer.bn is not None and not all(bool(torch.isfinite(x).all()) for x in layer.bn.buffers())]
    if bad:
        for layer, kept in zip(layers, before):
            for key, value in kept.items():
                layer.bn.get_buffer(key).copy_(value)
        raise QATError(bad[0], "statistics with NaN or Inf on these batches", "finite ones", "Leave such batches out.")


def refold(prepared: QuantGraph, fold: str) -> QuantGraph:
    """A copy of `prepared` with another training strategy and the same inference function.

    Raises:
        ConfigError: unknown strategy.
        QATError: a strategy that cannot follow (from 'static', whose BatchNorm is gone; scale_merge on per-tensor weights).
    """
    check_name("refold", fold, STRATEGIES)
    changed = copy.deepcopy(prepared)
    layers = folded_layers(changed)
    for name, _ in prepared.fold_report.folded:
        changed.set_submodule(name, refold_layer(layers[name], fold))
    tell_layers_their_input(changed)
    changed.meta = copy.deepcopy(prepared.meta)
    gone = [name for name, _ in prepared.fold_report.folded if layers[name].keeps_bn and not STRATEGIES[fold].keeps_bn]
    changed.normal_outputs.update({name: layer_output(layers[name]) for name in gone})
    changed.recompile()
    return changed


def _run(prepared: QuantGraph, batch: Any) -> None:
    prepared(*inputs_of(prepared, batch))


@contextmanager
def modes_restored(prepared: nn.Module) -> Iterator[None]:
    modes = [(m, m.training) for m in prepared.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
