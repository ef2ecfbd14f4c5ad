"""Where activation quantizers go: one for each activation tensor, after the fused activation.

- The network's input, and every operation that makes new values, gets one on its output.
- A layer, addition, multiplication, concatenation or norm whose only reader is an activation is fused with it: the
  quantizer stands after the activation. Between a convolution, its BatchNorm and its activation there is none.
- Operations that move, select or drop values (max-pool, reshape, slicing, nearest upsampling, dropout) keep the grid of
  their input.
- Parameters and buffers read directly by the graph (layer scales, position biases) are quantized where they are read.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import fx, nn

from qat.fold import FoldedConvBN
from qat.graph.config import QATConfig
from qat.graph.kinds import is_activation_node, keeps_scale, module_of
from qat.quant import FakeQuantizer

QUANTIZERS = "quantizers"
Quantizer = TypeVar("Quantizer", bound=nn.Module)


def place_quantizers(graph: fx.GraphModule, config: QATConfig) -> None:
    """Insert FakeQuantizers into an annotated graph; they become `quantizers.<node name>`."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    graph.add_submodule(QUANTIZERS, nn.Module())
    for node in [n for n in graph.graph.nodes if _needs_quantizer(n, modules, config)]:
        constant = node.op == "get_attr"
        spec, range_name = config.activation_for(*_names(node), *_names(_fused_with(node, modules)))
        quantizer = FakeQuantizer(spec, range="minmax" if constant else range_name, running=not constant)
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


def tell_layers_their_input(graph: fx.GraphModule) -> None:
    """Give each FoldedConvBN the quantizer of the tensor it reads; none where its calls read tensors of different grids."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    found: dict[FoldedConvBN, set[FakeQuantizer | None]] = {}
    for node in graph.graph.nodes:
        layer = module_of(node, modules)
        if isinstance(layer, FoldedConvBN):
            found.setdefault(layer, set()).add(quantizer_behind(node, modules, FakeQuantizer))
    for layer, quantizers in found.items():
        layer.set_input_quantizer(quantizers.pop() if len(quantizers) == 1 else None)


def _names(node: fx.Node | None) -> tuple[str, ...]:
    """What an override may call a node's tensor: the graph node, and the module or input."""
    if node is None:
        return ()
    return (node.name, str(node.target)) if node.op != "call_function" else (node.name,)


def _fused_with(node: fx.Node, modules: dict[str, nn.Module]) -> fx.Node | None:
    """The layer or operation whose output a fused activation's node is the tensor of."""
    source = node.args[0] if is_activation_node(node, modules) and node.args else None
    fused = isinstance(source, fx.Node) and len(source.users) == 1 and not keeps_scale(source, modules)
    return source if fused and isinstance(source, fx.Node) and source.op not in ("placeholder", "get_attr") else None


def _needs_quantizer(node: fx.Node, modules: dict[str, nn.Module], config: QATConfig) -> bool:
    meta = node.meta.get("tensor_meta")
    if node.op == "output" or meta is None or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
        return False
    if config.skips(node.name) or (node.op != "call_function" and config.skips(str(node.target))):
        return False
    if keeps_scale(node, modules):
        return False
    fused = len(node.users) == 1 and is_activation_node(next(iter(node.users)), modules) and not is_activation_node(node, modules)
    return not (fused and node.op not in ("placeholder", "get_attr"))
