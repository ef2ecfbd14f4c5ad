"""Where activation quantizers go: one for each activation tensor, after the fused activation.

- The network's input, and every operation that makes new values, gets one on its output.
- A layer, addition, multiplication, concatenation or norm whose only reader is an activation is fused with it: the
  quantizer stands after the activation. Between a convolution, its BatchNorm and its activation there is none.
- Where the target adds the sums of a convolution to a residual branch before it rounds them, that convolution has none.
- Operations that move, select or drop values (max-pool, reshape, slicing, nearest upsampling, dropout) keep the grid of
  their input.
- Parameters and buffers read directly by the graph (layer scales, position biases) are quantized where they are read.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, fx, nn

from qat.fold import FoldedConvBN
from qat.graph.config import QATConfig
from qat.graph.kinds import arithmetic_of, is_activation_node, is_taken_out, keeps_scale, module_of
from qat.quant import FakeQuantizer
from qat.targets import TARGETS

QUANTIZERS = "quantizers"
NEXT_INPUTS = "next_inputs"
Quantizer = TypeVar("Quantizer", bound=nn.Module)


def place_quantizers(graph: fx.GraphModule, config: QATConfig) -> None:
    """Insert FakeQuantizers into an annotated graph; they become `quantizers.<node name>`."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    graph.add_submodule(QUANTIZERS, nn.Module())
    # Looked up before the first quantizer stands in the graph.
    names = {node: tensor_names(node, modules) for node in graph.graph.nodes if _needs_quantizer(node, modules, config)}
    for node in names:
        constant = node.op == "get_attr"
        spec, range_name = config.activation_for(*names[node])
        headroom = 0.5 if node.op == "placeholder" and config.target and not TARGETS[config.target].rounds_as_onnx else 0.0
        quantizer = FakeQuantizer(spec, range="minmax" if constant else range_name, running=not constant, headroom=headroom)
        quantizer.name = f"{QUANTIZERS}.{node.name}"
        graph.add_submodule(quantizer.name, quantizer)
        with graph.graph.inserting_after(node):
            quantized = graph.graph.call_module(quantizer.name, (node,))
        quantized.meta["tensor_meta"] = node.meta["tensor_meta"]
        node.replace_all_uses_with(quantized, delete_user_cb=lambda user, keep=quantized: user is not keep)


def quantizer_behind(node: fx.Node, modules: dict[str, nn.Module], kind: type[Quantizer]) -> Quantizer | None:
    """The `kind` that gave the tensor a node reads its grid, found behind the operations that keep it; None where there is none."""
    source: Any = node.args[0] if node.args else None
    while isinstance(source, fx.Node):
        module = module_of(source, modules)
        if isinstance(module, kind):
            return module
        if not keeps_scale(source, modules) or not source.args:
            return None
        source = source.args[0]
    return None


class NextInput(nn.Identity):
    """Stands before a call of a layer that is called several times and tells it the quantizer of what comes."""

    def __init__(self, layer: FoldedConvBN, quantizer: FakeQuantizer | None):
        super().__init__()
        # A tuple: both belong to the graph, and must not be saved, moved or switched as a part of this.
        self.told = (layer, quantizer)

    def forward(self, x: Tensor) -> Tensor:
        layer, quantizer = self.told
        layer.set_input_quantizer(quantizer)
        return x


def tell_layers_their_input(graph: fx.GraphModule) -> None:
    """Give each FoldedConvBN the quantizer of the tensor it reads; before each call where the calls of a layer read different grids."""
    remove_next_inputs(graph)
    modules = dict(graph.named_modules(remove_duplicate=False))
    calls: dict[FoldedConvBN, list[tuple[fx.Node, FakeQuantizer | None]]] = {}
    for node in graph.graph.nodes:
        layer = module_of(node, modules)
        if isinstance(layer, FoldedConvBN):
            calls.setdefault(layer, []).append((node, quantizer_behind(node, modules, FakeQuantizer)))
    for layer, found in calls.items():
        layer.set_input_quantizer(found[0][1])
        if len({quantizer for _, quantizer in found}) == 1:
            continue
        for node, quantizer in found:
            name = f"{NEXT_INPUTS}.{node.name}"
            graph.add_submodule(name, NextInput(layer, quantizer))
            source: Any = node.args[0]
            with graph.graph.inserting_before(node):
                told = graph.graph.call_module(name, (source,))
            told.meta["tensor_meta"] = source.meta["tensor_meta"]
            node.args = (told, *node.args[1:])


def remove_next_inputs(graph: fx.GraphModule) -> None:
    """Take every NextInput out of the graph."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in list(graph.graph.nodes):
        if isinstance(module_of(node, modules), NextInput):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.graph.erase_node(node)
    if hasattr(graph, NEXT_INPUTS):
        graph.delete_submodule(NEXT_INPUTS)


def _names(node: fx.Node) -> tuple[str, ...]:
    """What an override may call a node's tensor: the graph node, and the module or input that it is, or is taken out of."""
    if is_taken_out(node):
        return (node.name, *_names(node.all_input_nodes[0]))
    return (node.name, str(node.target)) if node.op != "call_function" else (node.name,)


def tensor_names(node: fx.Node, modules: dict[str, nn.Module]) -> tuple[str, ...]:
    """What an override may call the tensor of a node that has a quantizer: by the node, and by the layer or operation fused with it."""
    source = fused_source(node, modules)
    return _names(node) if source is None else (*_names(node), *_names(source))


def fused_source(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The layer or operation whose only reader is this activation, so that both have one tensor; None for other nodes."""
    source = node.args[0] if node.args else None
    return source if isinstance(source, fx.Node) and _is_fused(source, modules) and not keeps_scale(source, modules) else None


def _is_fused(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether the only reader of a node's tensor is the activation it is fused with, so that the tensor itself never exists."""
    if node.op in ("placeholder", "get_attr") or len(node.users) != 1 or isinstance(module_of(node, modules), FakeQuantizer):
        return False
    return is_activation_node(next(iter(node.users)), modules) and not is_activation_node(node, modules)


def _needs_quantizer(node: fx.Node, modules: dict[str, nn.Module], config: QATConfig) -> bool:
    meta = node.meta.get("tensor_meta")
    if node.op == "output" or meta is None or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
        return False
    if any(config.skips(name) for name in _names(node)):
        return False
    if config.target is not None and TARGETS[config.target].keeps_sums and _sums_are_added(node, modules):
        return False
    return not keeps_scale(node, modules) and not _is_fused(node, modules)


def _sums_are_added(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a layer's output is read by an addition alone, as its first such operand."""
    if not isinstance(module_of(node, modules), FoldedConvBN) or len(node.users) != 1:
        return False
    (addition,) = node.users
    if arithmetic_of(addition) not in ("add", "sub"):
        return False
    layers = [n for n in addition.all_input_nodes if isinstance(module_of(n, modules), FoldedConvBN) and len(n.users) == 1]
    return layers[0] is node
