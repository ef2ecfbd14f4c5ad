"""From a trained network with fake quantizers to integers: same graph, integer weights, int32 biases, fixed scales."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.deploy.elementwise import integer_binary
from qat.deploy.modules import IntegerLayer, KeepFloat, QuantizeDequantize
from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.fold.rounded_away import describe_rounded_away, rounded_away
from qat.graph.kinds import WEIGHTED, is_clip_node, is_softmax_node, keeps_scale, module_of
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.lifecycle import folded_layers
from qat.graph.place import QUANTIZERS, quantizer_behind, remove_next_inputs
from qat.graph.prepared import QuantGraph
from qat.quant import FakeQuantizer
from qat.quant.bias import too_large


def convert(prepared: QuantGraph) -> QuantGraph:
    """Integers of a prepared network; `prepared` is left untouched.

    Warns of layers whose weight scale was raised, and of those whose one weight scale rounds channels to 0; the latter stand in the notes
    of `.fold_report` as well.

    Returns:
        a network in eval mode whose forward is the arithmetic of the graph that `export_onnx` writes.

    Raises:
        QATError: not a prepared network, or an activation quantizer that has seen no data.
    """
    if isinstance(prepared, QuantGraph) and prepared.meta.get("converted"):
        raise QATError("convert", "a network that is converted already", "a network from qat.prepare", "Convert the prepared network once.")
    if not isinstance(prepared, QuantGraph) or not any(isinstance(m, FakeQuantizer) for m in prepared.modules()):
        compiled = hasattr(prepared, "_orig_mod")
        todo = "Give it the network that was compiled." if compiled else "Call qat.prepare and qat.calibrate or train first."
        raise QATError("convert", type(prepared).__name__, "a network from qat.prepare", todo)
    graph = copy.deepcopy(prepared).eval().cpu()
    vanished = [describe_rounded_away(name, channels) for name, layer in folded_layers(graph).items() if (channels := rounded_away(layer))]
    for line in vanished:
        warnings.warn(line, stacklevel=2)
    remove_next_inputs(graph)
    _one_module_a_call(graph)
    with torch.no_grad():
        _replace(graph, FakeQuantizer, lambda quantizer, node, modules: _grid(quantizer, node, graph))
        _replace(graph, FoldedConvBN, _integer_layer)
    _replace(graph, LeftBatchNorm, lambda left, node, modules: left.bn)
    _repeat_kept_grids(graph)
    _fuse_elementwise(graph)
    _keep_float_layers(graph)
    report = copy.deepcopy(prepared.fold_report)
    report.notes += vanished
    graph.meta = {**prepared.meta, "fold_report": report, "converted": True}
    graph.recompile()
    return graph.eval()


def _one_module_a_call(graph: fx.GraphModule) -> None:
    """Copy layers that are called more than once: each call has the bias of its own input's scale."""
    seen: set[int] = set()
    for node in graph.graph.nodes:
        layer = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        if not isinstance(layer, FoldedConvBN):
            continue
        if id(layer) in seen:
            name = f"{node.target!s}_{node.name}"
            graph.set_submodule(name, copy.deepcopy(layer))
            node.target = name
        seen.add(id(layer))


def _replace(graph: fx.GraphModule, kind: type[nn.Module], build: Callable[[Any, fx.Node, dict[str, nn.Module]], nn.Module]) -> None:
    """Put build(module, node, modules by name) in the place of every called module of `kind`."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in graph.graph.nodes:
        name = str(node.target)
        if node.op == "call_module" and isinstance(modules[name], kind):
            modules[name] = build(modules[name], node, modules)
            graph.set_submodule(name, modules[name])


def _repeat_kept_grids(graph: fx.GraphModule) -> None:
    """Put the input's grid on the output of operations that keep it: no value changes, and runtimes see every tensor quantized."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in list(graph.graph.nodes):
        meta = node.meta.get("tensor_meta")
        if not keeps_scale(node, modules) or not hasattr(meta, "dtype") or not meta.dtype.is_floating_point:
            continue
        if all(keeps_scale(user, modules) for user in node.users):
            continue
        source = quantizer_behind(node, modules, QuantizeDequantize)
        if source is None:
            continue
        name = f"{QUANTIZERS}.{node.name}"
        graph.add_submodule(name, QuantizeDequantize(source.scale, source.zero_point, source.spec, name))
        modules[name] = graph.get_submodule(name)
        with graph.graph.inserting_after(node):
            repeated = graph.graph.call_module(name, (node,))
        repeated.meta["tensor_meta"] = meta
        node.replace_all_uses_with(repeated, delete_user_cb=lambda user, keep=repeated: user is not keep)


def _fuse_elementwise(graph: fx.GraphModule) -> None:
    """Put integer modules in the place of additions and multiplications of two quantized tensors that runtimes fuse."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in list(graph.graph.nodes):
        fused = integer_binary(node, _grid_ahead(node, modules), modules)
        if fused is None:
            continue
        name = f"integer.{node.name}"
        graph.add_submodule(name, fused)
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(name, node.args)
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)


def _keep_float_layers(graph: fx.GraphModule) -> None:
    """Put KeepFloat in front of every softmax, and every module with float weights, that reads a quantized tensor."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in list(graph.graph.nodes):
        module = module_of(node, modules)
        weighted = module is not None and not isinstance(module, IntegerLayer) and any(isinstance(m, WEIGHTED) for m in module.modules())
        if not weighted and not is_softmax_node(node, modules):
            continue
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not isinstance(module_of(source, modules), QuantizeDequantize):
            continue
        name = f"keep_float.{node.name}"
        graph.add_submodule(name, KeepFloat())
        with graph.graph.inserting_before(node):
            kept = graph.graph.call_module(name, (source,))
        node.replace_input_with(source, kept)


def _grid(quantizer: FakeQuantizer, node: fx.Node, graph: fx.GraphModule) -> QuantizeDequantize:
    if not quantizer.enabled:
        raise QATError(str(node.target), "fake quantization switched off", "an enabled quantizer", "Call qat.set_fake_quant(prepared).")
    source: Any = node.args[0]
    value = _attribute(graph, str(source.target)) if source.op == "get_attr" else None
    if value is None and not quantizer.initialized:
        raise QATError(str(node.target), "a quantizer that has seen no data", "ranges", "Run qat.calibrate(prepared, batches) or train.")
    scale, zero_point = quantizer.qparams_for(value if value is not None else torch.zeros(1))
    return QuantizeDequantize(scale, zero_point, quantizer.spec, str(node.target))


def _attribute(graph: fx.GraphModule, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(graph.get_submodule(owner), leaf)


def _integer_layer(layer: FoldedConvBN, node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module:
    name = str(node.target)
    if layer.weight_quantizer is None:
        raise QATError(name, "no weight quantizer", "a layer with quantized weights", "Prepare the network with qat.prepare.")
    grid = quantizer_behind(node, modules, QuantizeDequantize)
    codes, scale, bias = layer.integer(None if grid is None else grid.scale)
    if not bool(torch.isfinite(bias).all() and torch.isfinite(layer.weight_to_quantize()).all()):
        raise QATError(name, "NaN or Inf in its weights or statistics", "finite ones", "Look at the training that made them.")
    if grid is not None:
        short = too_large(bias, layer.weight_codes()[1] * grid.scale).nonzero().flatten().tolist()
        if short:
            warnings.warn(f"{name}: the int32 bias of channels {short} overflows at their scale; the weight scale was raised", stacklevel=3)
    return IntegerLayer(layer.conv, codes, scale, bias, grid, _grid_ahead(node, modules), layer.weight_quantizer.spec.bits, name)


def _grid_ahead(node: fx.Node, modules: dict[str, nn.Module]) -> QuantizeDequantize | None:
    """The grid that a layer's output is put on, as kernels fuse it: directly, or through clips that its lowest code, zero, does as well."""
    clipped = False
    while len(node.users) == 1:
        (node,) = node.users
        module = module_of(node, modules)
        if isinstance(module, QuantizeDequantize):
            return None if clipped and int(module.zero_point) != module.spec.qmin else module
        if not is_clip_node(node, modules):
            return None
        clipped = True
    return None
