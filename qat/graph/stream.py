"""Many batches on their way through a network, one segment at a time.

A segment starts with a call of a quantized layer and ends in front of the next one. A batch goes through the whole of it before the next
batch starts, so that of all the tensors inside only one batch's are held at a time; between segments, those that a later node reads,
quantized ones as their integers, a byte each.
Networks with the same graph, as a prepared network and its `float_copy`, can go side by side.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph.kinds import keeps_scale
from qat.graph.lifecycle import set_fake_quant
from qat.graph.place import NextInput, quantizer_behind
from qat.graph.prepared import QuantGraph, copy_of, each_batch, inputs_of
from qat.quant import FakeQuantizer


def float_copy(prepared: QuantGraph) -> QuantGraph:
    """A copy in evaluation mode that computes the float function: all quantizers switched off."""
    copied = copy_of(prepared).eval()
    set_fake_quant(copied, weights=False, activations=False)
    return copied


def give_back_memory() -> None:
    """Hand what was freed back to the system. glibc keeps freed blocks of less than some megabytes for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class Stop:
    """In front of one call of a quantized layer, which no batch has entered.

    Attributes:
        name: of the layer.
        node: the call, in the graph of the first network.
        layers: the layer in each network.
        call, calls: which of the layer's calls this is, from 0, and how many there are.
    """

    name: str
    node: fx.Node
    layers: tuple[FoldedConvBN, ...]
    call: int
    calls: int


class Stream:
    """The batches in front of each call of a FoldedConvBN in turn, in the order of the graph.

    Whoever iterates may change the layer in front of which the batches stand (not the graph): they go on through it as it then is. The
    networks compute as they are set; put them into evaluation mode. No gradients are kept.

    Args:
        networks: with the same graph, for example `(prepared, float_copy(prepared))`.
        batches: items are a tensor or a tuple of the networks' positional inputs. Read once, and not held.

    Raises:
        QATError: no batches; a batch of another number of inputs.
    """

    def __init__(self, networks: Sequence[fx.GraphModule], batches: Iterable[Any]):
        self._batches = each_batch(batches)
        self._walks = [_Walk(network) for network in networks]
        # For each batch the values that each network still needs.
        self._held: list[tuple[dict[fx.Node, Any], ...]] = []

    def __iter__(self) -> Iterator[Stop]:
        nodes = self._walks[0].nodes
        calls = [i for i, node in enumerate(nodes) if isinstance(self._walks[0].module(node), FoldedConvBN)]
        names = [str(nodes[i].target) for i in calls]
        total, seen, at = Counter(names), Counter[str](), 0
        for index, name in zip(calls, names):
            # What tells a layer which input comes belongs to its call: other batches must not be told in between.
            told = self._walks[0].told_at(index)
            at = self._advance(at, index if told is None else told)
            give_back_memory()
            self._call = index
            for walk in self._walks:
                walk.tell(told)
            layers: Any = tuple(walk.module(walk.nodes[index]) for walk in self._walks)
            yield Stop(name, nodes[index], layers, seen[name], total[name])
            seen[name] += 1

    def inputs(self, network: int = 0) -> Iterator[Tensor]:
        """The input of the layer in front of which the batches stand, batch by batch."""
        walk = self._walks[network]
        source: Any = walk.nodes[self._call].args[0]
        if isinstance(walk.module(source), NextInput):
            source = source.args[0]
        return (_unpacked(held[network][source]) for held in self._held)

    @torch.no_grad()
    def outputs(self, network: int = 0) -> Iterator[Any]:
        """What the network gives for each batch with its layers as they are set, from where the batches stand. They stay there."""
        walk = self._walks[network]
        for held in self._held:
            yield fx.Interpreter(walk.network).run(initial_env={node: _unpacked(value) for node, value in held[network].items()})

    @torch.no_grad()
    def _advance(self, start: int, stop: int) -> int:
        if start == 0:
            for batch in self._batches:
                values = tuple(walk.placed(batch) for walk in self._walks)
                for walk, of_walk in zip(self._walks, values):
                    walk.run(of_walk, start, stop)
                self._held.append(values)
            if not self._held:
                raise QATError("batches", "none", "at least one batch of inputs", "Pass an iterable of tensors or tuples.")
            return stop
        for values in self._held:
            for walk, of_walk in zip(self._walks, values):
                walk.run(of_walk, start, stop)
        return stop


class _Walk:
    """One network, node by node."""

    def __init__(self, network: fx.GraphModule):
        self.network = network
        self.nodes = list(network.graph.nodes)
        self._runner = fx.Interpreter(network, garbage_collect_values=False)
        self._modules = dict(network.named_modules(remove_duplicate=False))
        last = {source: i for i, node in enumerate(self.nodes) for source in node.all_input_nodes}
        self._finished: list[list[fx.Node]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            self._finished[last.get(node, i)].append(node)

    def module(self, node: Any) -> Any:
        is_call = isinstance(node, fx.Node) and node.op == "call_module"
        return self.network.get_submodule(str(node.target)) if is_call else None

    def told_at(self, call: int) -> int | None:
        """Where the NextInput of a layer's call stands, if it has one."""
        source: Any = self.nodes[call].args[0]
        return self.nodes.index(source) if isinstance(self.module(source), NextInput) else None

    def tell(self, index: int | None) -> None:
        if index is not None:
            layer, quantizer = self.module(self.nodes[index]).told
            layer.set_input_quantizer(quantizer)

    def placed(self, batch: Any) -> dict[fx.Node, Any]:
        """A batch at the network's inputs; those that it leaves out have their defaults."""
        places = [node for node in self.nodes if node.op == "placeholder"]
        inputs = inputs_of(self.network, batch)
        return dict(zip(places, (*inputs, *(node.args[0] for node in places[len(inputs) :]))))

    def run(self, values: dict[fx.Node, Any], start: int, stop: int) -> None:
        """Compute the nodes from `start` to before `stop`, and let go of what none behind reads."""
        packed = {node: value for node, value in values.items() if isinstance(value, _Packed)}
        values.update({node: value.tensor() for node, value in packed.items()})
        self._runner.env = values
        for i in range(start, stop):
            node = self.nodes[i]
            if node.op not in ("placeholder", "output"):
                values[node] = self._runner.run_node(node)
            for done in self._finished[i]:
                values[done] = None  # the key stays: `outputs` must not compute it again
        self._runner.env = {}
        for node, value in values.items():
            if isinstance(value, Tensor):
                values[node] = packed[node] if node in packed else self._packed(node, value)

    def _packed(self, node: fx.Node, value: Tensor) -> Any:
        """The integers of a quantized tensor, as far as they give it back to the bit; any other as it is."""
        quantizer = self.module(node)
        if not isinstance(quantizer, FakeQuantizer):
            quantizer = quantizer_behind(node, self._modules, FakeQuantizer) if keeps_scale(node, self._modules) else None
        if quantizer is None or not (quantizer.enabled and quantizer.initialized) or quantizer.scale.ndim:
            return value
        scale, zero_point = quantizer.qparams_for(value)
        codes = quantizer.codes(value).to(torch.int8 if quantizer.spec.signed else torch.uint8)
        packed = _Packed(codes, scale.to(value.dtype), zero_point)
        return packed if torch.equal(packed.tensor(), value) else value


@dataclass(frozen=True)
class _Packed:
    """A tensor as its integers; scale and zero point are ()."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def tensor(self) -> Tensor:
        return (self.codes.to(self.scale.dtype) - self.zero_point).mul_(self.scale)


def _unpacked(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Packed) else value
