"""Weights of the float network into a network that is prepared already."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.lifecycle import folded_layers
from qat.graph.place import QUANTIZERS
from qat.graph.prepared import QuantGraph

_SHOWN = 5
_CORRECTION = ".bias_correction"


def load_float(prepared: QuantGraph, state: Mapping[str, Tensor]) -> None:
    """Load a state dict of the float network that `prepared` was made from; every tensor must fit, BatchNorms' counters may be absent.

    Weight ranges that are not held start again from the new weights, ranges of activations stay: calibrate afterwards. What is frozen
    stays frozen. Bias corrections are gone; biases that post-training methods gave to layers without one are 0.

    Args:
        state: tensors under the float network's own names.

    Raises:
        QATError: missing or unexpected names, other shapes; a folded 'static' layer, whose BatchNorm is gone. Nothing is loaded then.
    """
    layers, norms = folded_layers(prepared), dict(prepared.fold_report.folded)
    gone = next((name for name in norms if not layers[name].keeps_bn), None)
    if gone is not None:
        todo = "Load the weights into the float model, then prepare it."
        raise QATError(gone, "a static layer, whose BatchNorm is gone", "a strategy that keeps it", todo)
    own = {key: value for key, value in prepared.state_dict().items() if not key.endswith(_CORRECTION)}
    names = float_names(prepared)
    for key in [key for key, name in names.items() if name not in prepared.meta.get("float_state", (name,)) and _is_bias(layers, key)]:
        own[key] = torch.zeros_like(own[key])
        del names[key]
    found = {key: state[name] for key, name in names.items() if name in state}
    missing = [name for key, name in names.items() if key not in found and not name.endswith("num_batches_tracked")]
    # What its forward never reaches, and further names of shared modules, the float network's state has too.
    unexpected = sorted(set(state) - set(names.values()) - set(prepared.meta.get("float_state", ())))
    shapes = [f"{names[k]} {tuple(v.shape)} instead of {tuple(own[k].shape)}" for k, v in found.items() if v.shape != own[k].shape]
    lists = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    if wrong := [f"{len(keys)} tensors {what}: {', '.join(keys[:_SHOWN])}" for what, keys in lists.items() if keys]:
        raise QATError("load_float", "; ".join(wrong), "the tensors of the float network", "Load the weights this network was made for.")
    prepared.load_state_dict(own | found)
    for layer in layers.values():
        if layer.weight_quantizer is not None and layer.weight_quantizer.observing:
            layer.weight_quantizer.initialize(layer.weight_to_quantize())


def float_names(prepared: QuantGraph) -> dict[str, str]:
    """Name in the prepared network's state dict -> name in the float network's, for all that the float network has."""
    layers, norms = folded_layers(prepared), dict(prepared.fold_report.folded)
    activations = {f"{norm}." for norm in norms.values()}
    prefixes = {f"{name}.conv.": f"{name}." for name in norms} | {f"{name}.bn.": f"{norm}." for name, norm in norms.items()}
    prefixes |= {f"{name}.bn.": f"{name}." for name, module in prepared.named_modules() if isinstance(module, LeftBatchNorm)}
    found = {}
    for key in prepared.state_dict():
        owner, _, leaf = key.rpartition(".")
        if leaf == "_extra_state" or key.endswith(_CORRECTION) or key.startswith(f"{QUANTIZERS}.") or owner.endswith("weight_quantizer"):
            continue
        if owner in layers:
            found[key] = f"{owner}.{leaf.removesuffix('_fold')}"
        elif start := next((prefix for prefix in prefixes if key.startswith(prefix)), None):
            found[key] = prefixes[start] + key.removeprefix(start)
        elif start := next((prefix for prefix in activations if key.startswith(prefix)), None):
            found[key] = f"{start}act.{leaf}"  # a BatchNorm's own activation, which took its place in the graph
        else:
            found[key] = key
    return found


def _is_bias(layers: Mapping[str, FoldedConvBN], key: str) -> bool:
    """Whether a name in the state dict is the bias of a folded layer."""
    return any(key == f"{name}.{layer.bias_key}" for name, layer in layers.items())
