"""What each layer's quantizers cost: the network with one layer's alone, and with all but that layer's.

A layer is what a rule of `QATConfig.overrides` can name: a weight and the tensor behind it (after the activation fused with it), called
once or several times; an operation without weights that has a quantizer of its own (addition, average pool); the network's input.
Operations that keep the grid of their input (max-pool, reshape) have no quantizer and are no layer here.

A layer rounds its bias while its weight and its input are both on a grid. So the rounding of biases is in no `alone`; `others` holds that
of the layer and of the layers that read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import fx, nn

from qat.choose import check_name
from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph.kinds import module_of
from qat.graph.lifecycle import check_calibrated, modes_restored
from qat.graph.place import fused_source, tensor_names
from qat.graph.prepared import QuantGraph
from qat.quant import FakeQuantizer

ALONE, OTHERS = "alone", "others"

Reading = TypeVar("Reading")


@dataclass(frozen=True)
class LayerLoss:
    """What the quantizers of one layer cost; None where it was not asked for.

    Attributes:
        name: as in `QATConfig.overrides`.
        alone: loss with this layer alone quantized, minus the loss with nothing quantized.
        others: loss with everything quantized, minus the loss with all but this layer quantized.
    """

    name: str
    alone: float | None
    others: float | None


@dataclass(frozen=True)
class Readings(Generic[Reading]):
    """What was read with nothing quantized, with everything, and by layer with it alone and with all but it; {} where not asked for."""

    unquantized: Reading
    quantized: Reading
    alone: dict[str, Reading]
    others: dict[str, Reading]


def layer_losses(prepared: QuantGraph, loss: Callable[[nn.Module], float], only: str | None = None) -> list[LayerLoss]:
    """How much the loss depends on each layer's quantizers, in graph order. The network is left as it was, also when `loss` raises.

    "Everything" is what is switched on in `prepared`; what is switched off stays so, and a layer with nothing on is left out. The network
    is in eval mode meanwhile. One call of `loss` a layer and kind, and two more.

    Args:
        prepared: calibrated, on any device.
        loss: of the network it is given, which is `prepared` itself; the same pictures at each call.
        only: "alone" or "others", the one to measure; None for both.

    Raises:
        ConfigError: another `only`.
        QATError: a network that is not calibrated, or in which no quantizer is on.
    """
    found = readings(prepared, lambda network: float(loss(network)), only)
    return [
        LayerLoss(
            name,
            found.alone[name] - found.unquantized if name in found.alone else None,
            found.quantized - found.others[name] if name in found.others else None,
        )
        for name in (found.alone or found.others)
    ]


def readings(
    prepared: QuantGraph, read: Callable[[nn.Module], Reading], only: str | None = None, among: Collection[str] | None = None
) -> Readings[Reading]:
    """`read` of the network in every state that `layer_losses` compares; arguments and errors as there.

    Args:
        among: names of the layers to read; None for all.
    """
    kinds = (ALONE, OTHERS) if only is None else (check_name("only", only, (ALONE, OTHERS)),)
    check_calibrated(prepared, switched_off=False)
    layers = {name: on for name, all_ in layer_quantizers(prepared).items() if (on := [q for q in all_ if q.enabled])}
    everything = [quantizer for on in layers.values() for quantizer in on]
    if not everything:
        raise QATError("layer_losses", "no quantizer switched on", "a network that quantizes", "Call qat.set_fake_quant(prepared).")

    def by_layer(kind: str) -> dict[str, Reading]:
        found = {}
        for name, own in layers.items():
            if kind not in kinds or (among is not None and name not in among):
                continue
            _switch(own, kind == ALONE)
            found[name] = read(prepared)
            _switch(own, kind != ALONE)
        return found

    with _restored(prepared), modes_restored(prepared), torch.no_grad():
        prepared.eval()
        _switch(everything, False)
        unquantized, alone = read(prepared), by_layer(ALONE)
        _switch(everything, True)
        return Readings(unquantized, read(prepared), alone, by_layer(OTHERS))


def layer_quantizers(prepared: QuantGraph) -> dict[str, list[FakeQuantizer]]:
    """The quantizers of each layer, that of the weight first, by the name a rule can give: in graph order.

    Operations go by the name that meets the fewest other tensors: of a module called once its qualified name, else the graph node's.
    """
    modules = dict(prepared.named_modules(remove_duplicate=False))
    tensors = {node: node.all_input_nodes[0] for node in prepared.graph.nodes if isinstance(module_of(node, modules), FakeQuantizer)}
    met = Counter(name for tensor in tensors.values() for name in {*tensor_names(tensor, modules)})
    layers: dict[nn.Module, str] = {}
    found: dict[str, list[FakeQuantizer]] = {}
    for node in prepared.graph.nodes:
        module = module_of(node, modules)
        if isinstance(module, FoldedConvBN):
            name = layers.setdefault(module, str(node.target))
            own = module.weight_quantizer
        elif isinstance(module, FakeQuantizer):
            name, own = _name(tensors[node], modules, layers, met), module
        else:
            continue
        if isinstance(own, FakeQuantizer) and not any(own is other for other in found.setdefault(name, [])):
            found[name].append(own)
    return found


def _name(tensor: fx.Node, modules: dict[str, nn.Module], layers: dict[nn.Module, str], met: Counter[str]) -> str:
    sources = [node for node in (fused_source(tensor, modules), tensor) if node is not None]
    owner = module_of(sources[0], modules)
    if owner is not None and owner in layers:
        return layers[owner]
    names = [name for node in sources for name in ((str(node.target), node.name) if node.op == "call_module" else (node.name,))]
    return min(names, key=lambda name: met[name])


def _switch(quantizers: list[FakeQuantizer], on: bool) -> None:
    for quantizer in quantizers:
        quantizer.enabled = on


@contextmanager
def _restored(prepared: nn.Module) -> Iterator[None]:
    """Puts back what is switched on, and which input a layer was told of last (a forward tells those that are called several times)."""
    switches = [(m, m.enabled) for m in prepared.modules() if isinstance(m, FakeQuantizer)]
    told = [(m, m.input_quantizer) for m in prepared.modules() if isinstance(m, FoldedConvBN)]
    try:
        yield
    finally:
        for quantizer, on in switches:
            quantizer.enabled = on
        for layer, before in told:
            layer.set_input_quantizer(before)
