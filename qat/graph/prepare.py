"""A float network made ready to train with folded BatchNorms and fake quantizers."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from qat.errors import QATError
from qat.fold import STRATEGIES, FoldedConvBN, check_foldable
from qat.fold.normal_output import normal_output
from qat.fold.static import Static
from qat.graph.capture import capture
from qat.graph.config import QATConfig
from qat.graph.kinds import BATCH_NORMS, FUNCTIONAL_LAYERS, WEIGHTED
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.match import Pair, match, owners, replace_norm
from qat.graph.place import place_quantizers, tell_layers_their_input
from qat.graph.prepared import QuantGraph
from qat.graph.report import FoldReport
from qat.quant import FakeQuantizer


def prepare(
    model: nn.Module, example_inputs: tuple, config: QATConfig | None = None, concrete_args: dict[str, Any] | None = None
) -> QuantGraph:
    """Fold what can be folded, quantize weights and activations; `model` is left untouched.

    Args:
        model: float network, in training or evaluation mode (kept).
        example_inputs: tuple of its positional inputs without those in concrete_args, for shapes only.
        config: strategy and quantizers; QATConfig() when absent.
        concrete_args: values of forward's arguments by name, fixed in the network, which does not take them any more.

    A forward that branches on the values of a tensor is no single graph. Three ways out, each with an example in docs/capture.md:
        leaf: `QATConfig(overrides={"gate": {"leaf": True}})` keeps the module whole and float; its input and output are quantized.
        concrete arguments: `prepare(model, (x,), concrete_args={"mode": "fast"})`, where an argument decides.
        skip: `QATConfig(overrides={"gate": {"skip": True}})` leaves the module and its output float.

    Returns:
        a network to train with any loop; layers keep their qualified names, activation quantizers are
        `quantizers.<graph node>`; `.fold_report` says what was folded and what was left, with the reason.

    Raises:
        CaptureError: the forward is no single graph; names the module, its source line and the ways out.
        QATError: a network prepared before; an override that matches nothing; concrete_args that forward does not take.
    """
    config = QATConfig() if config is None else config
    if not isinstance(config, QATConfig):
        raise QATError("prepare", f"{config!r} as config", "a QATConfig", "Write qat.QATConfig(fold='static').")
    if any(isinstance(m, (FoldedConvBN, FakeQuantizer)) for m in model.modules()):
        raise QATError("prepare", "a network that is prepared already", "a float network", "Prepare the float model, or use qat.refold.")
    graph, notes = capture(model, example_inputs, config.keeps_whole, concrete_args)
    pairs, report = match(graph, model, config.keeps_whole)
    report.notes += notes
    check_overrides(model, graph, config)
    folded_away = [] if STRATEGIES[config.fold].keeps_bn else pairs
    normal = {str(pair.layer.target): normal_output(graph.get_submodule(str(pair.norm.target))) for pair in folded_away}
    for pair in pairs:
        _fold_pair(graph, pair, config, model.training)
    _quantize_other_layers(graph, config, report)
    _wrap_left_norms(graph, model.training)
    place_quantizers(graph, config)
    tell_layers_their_input(graph)
    prepared = QuantGraph.finished(graph, report, model)
    prepared.normal_outputs.update(normal)
    prepared.meta["target"] = config.target
    prepared.meta["float_state"] = tuple(model.state_dict())
    return prepared


def check_overrides(model: nn.Module, graph: fx.GraphModule, config: QATConfig) -> None:
    """Raise QATError where a pattern matches neither a module of the model nor a node of its graph."""
    names = sorted({name for name, _ in model.named_modules() if name} | {n.name for n in graph.graph.nodes})
    for pattern in config.overrides:
        if not any(fnmatchcase(name, pattern) for name in names):
            close = difflib.get_close_matches(pattern, names, n=3)
            hint = f"Did you mean {', '.join(close)}?" if close else "See model.named_modules() for the names."
            raise QATError(f"overrides['{pattern}']", "no layer or graph node of that name", "a pattern that matches", hint)


def _weight_quantizer(name: str, config: QATConfig) -> FakeQuantizer:
    spec, range_name = config.weight_for(name)
    quantizer = FakeQuantizer(spec, range=range_name, running=False)
    quantizer.name = f"{name}.weight_quantizer"
    return quantizer


def _fold_pair(graph: fx.GraphModule, pair: Pair, config: QATConfig, training: bool) -> None:
    name, norm_name = str(pair.layer.target), str(pair.norm.target)
    conv, bn = graph.get_submodule(name), graph.get_submodule(norm_name)
    try:
        layer = STRATEGIES[config.fold](conv, bn, _weight_quantizer(name, config), **config.fold_options)
    except QATError as error:
        raise type(error)(f"{name} ({error.where})", error.found, error.expected, error.todo) from None
    layer.name = name
    if training and not bn.training:
        layer.freeze()
    activation, layer.activation = layer.activation, nn.Identity()
    graph.set_submodule(name, layer)
    replace_norm(graph, pair, activation)
    bn.drop, bn.act = nn.Identity(), nn.Identity()


def _quantize_other_layers(graph: fx.GraphModule, config: QATConfig, report: FoldReport) -> None:
    owned = owners(graph)
    seen: set[int] = set()
    for node in graph.graph.nodes:
        if node.op != "call_module":
            if getattr(node.target, "__name__", "") in FUNCTIONAL_LAYERS:
                line = node.meta.get("source", "source line unknown")
                report.notes.append(f"{node.name}: functional call, its weight is quantized like an activation; use the nn module ({line})")
            continue
        name = str(node.target)
        layer = graph.get_submodule(name)
        if not isinstance(layer, WEIGHTED) or config.keeps_whole(name) or id(layer) in seen:
            continue
        seen.add(id(layer))
        tied = {other for p in layer.parameters() for other in owned[id(p)] if other != name and not other.startswith(f"{name}.")}
        if len(node.args) != 1 or node.kwargs:
            report.notes.append(f"{name}: stays float, it is called with more than its input")
            continue
        reason = f"shares a parameter with {', '.join(sorted(tied))}" if tied else check_foldable(layer, None)
        if reason is not None:
            report.notes.append(f"{name}: stays float, {reason}")
            continue
        quantized = Static(layer, None, _weight_quantizer(name, config))
        quantized.name = name
        graph.set_submodule(name, quantized)


def _wrap_left_norms(graph: fx.GraphModule, training: bool) -> None:
    for node in graph.graph.nodes:
        if node.op == "call_module" and isinstance(graph.get_submodule(str(node.target)), BATCH_NORMS):
            name = str(node.target)
            left = LeftBatchNorm(graph.get_submodule(name), name)
            if training and not left.bn.training:
                left.freeze()
            graph.set_submodule(name, left)
            for reader in graph.graph.nodes:
                if reader.op == "get_attr" and str(reader.target).startswith(f"{name}."):
                    reader.target = f"{name}.bn.{str(reader.target).removeprefix(f'{name}.')}"
