"""Weights of a prepared network back into the float network it was made from, to prepare it again with other grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.fold.arithmetic import sigma
from qat.graph.lifecycle import folded_layers
from qat.graph.load_float import float_names
from qat.graph.prepared import QuantGraph


@torch.no_grad()
def store_float(prepared: QuantGraph, network: nn.Module) -> None:
    """Make `network` compute what `prepared` does without fake quantization, in eval mode; statistics and what was trained go back to
    where they came from.

    A folded 'static' layer has no BatchNorm any more: its weight goes to the layer, and the BatchNorm becomes one that adds the bias. A
    bias that post-training methods gave to a layer without one becomes one of the layer or of its BatchNorm; behind a BatchNorm with
    gamma = 0 no running mean could hold it.

    Args:
        network: the float network of the same structure, on the same device; it is changed.

    Raises:
        QATError: tensors that are missing there or have another shape.
    """
    layers, norms = folded_layers(prepared), dict(prepared.fold_report.folded)
    own, state = prepared.state_dict(), network.state_dict()
    modules: dict[Any, Any] = dict(network.named_modules())
    rewritten = [name for name, layer in layers.items() if not layer.keeps_bn]
    for key, name in float_names(prepared).items():
        if key.rpartition(".")[0] in rewritten or (name not in state and key.endswith(".bn.bias")):
            continue
        _check(name, state.get(name), own[key])
        state[name].copy_(own[key])
    for name, layer in layers.items():
        target, norm = modules.get(name), modules.get(norms.get(name))
        if name in rewritten:
            _store_static(name, layer, target, norm)
        elif norm is not None and f"{norms[name]}.bias" not in state and layer.bn.bias is not None:
            norm.bias = nn.Parameter(layer.bn.bias.clone())


def _check(name: str, found: Tensor | None, wanted: Tensor) -> None:
    if found is None or found.shape != wanted.shape:
        told = "no such tensor in the float network" if found is None else f"{tuple(found.shape)} for {tuple(wanted.shape)}"
        raise QATError(name, told, "the float network this one was prepared from", "Build it as it was built then.")


def _store_static(name: str, layer: FoldedConvBN, target: Any, norm: Any) -> None:
    weight, bias = layer.folded()
    _check(f"{name}.weight", getattr(target, "weight", None), weight)
    target.weight.copy_(weight)
    if norm is None:
        if target.bias is not None:
            target.bias.copy_(bias)
        elif bool(bias.any()):
            target.bias = nn.Parameter(bias.clone())
        return
    if target.bias is not None:
        target.bias.zero_()
    norm.running_var.fill_(1 - norm.eps)
    norm.running_mean.copy_(-bias)
    if norm.weight is not None:
        norm.weight.copy_(sigma(norm.running_var, norm.eps))  # 1 but for rounding, so that gamma / sigma is 1
    if norm.bias is not None:
        norm.bias.zero_()
