"""Folding for inference: every BatchNorm that can be folded becomes part of the layer before it.

s = gamma / sigma; W_fold = s W; b_fold = (b - mu) s + beta.  [K18 eq. 20-21, WP21 eq. 9-12]
"""

from __future__ import annotations

from typing import Any

from torch import nn

from qat.fold.base import built_in_activation
from qat.fold.convolution import is_plain
from qat.fold.normal_output import normal_output
from qat.fold.probe import adds_bias
from qat.fold.static import fold_once
from qat.graph.capture import capture
from qat.graph.config import QATConfig
from qat.graph.match import match, replace_norm
from qat.graph.prepare import check_overrides
from qat.graph.prepared import QuantGraph


def fold(
    model: nn.Module,
    example_inputs: tuple,
    overrides: dict[str, dict[str, Any]] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> QuantGraph:
    """Float network without the foldable BatchNorms; in eval mode it computes what `model.eval()` computes.

    Args:
        overrides: pattern -> {"skip": True} or {"leaf": True}: modules not to look into, as in `QATConfig`; here both do the same.
        concrete_args: values of forward's arguments by name, as in `prepare`.

    Returns:
        a copy of the network; `.fold_report` lists folded pairs and what was left, with the reason.

    Raises:
        CaptureError: the forward is no single graph.
        QATError: overrides of another form or that match nothing; concrete_args that forward does not take.
    """
    config = QATConfig(overrides={} if overrides is None else overrides)
    graph, notes = capture(model, example_inputs, config.keeps_whole, concrete_args)
    check_overrides(model, graph, config)
    pairs, report = match(graph, model, config.keeps_whole)
    report.notes += notes
    normal = {}
    for pair in pairs:
        layer: Any = graph.get_submodule(str(pair.layer.target))
        bn = graph.get_submodule(str(pair.norm.target))
        weight, bias = fold_once(layer, bn)
        assert bias is not None  # a BatchNorm always leaves one
        if not is_plain(layer) and not adds_bias(layer, weight):
            report.folded.remove((str(pair.layer.target), str(pair.norm.target)))
            report.left.append((str(pair.norm.target), f"the forward of this {type(layer).__name__} adds no bias to its output"))
            continue
        layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
        layer.bias = nn.Parameter(bias, requires_grad=layer.weight.requires_grad)
        normal[str(pair.layer.target)] = normal_output(bn)
        replace_norm(graph, pair, built_in_activation(bn))
    folded = QuantGraph.finished(graph, report, model)
    folded.normal_outputs.update(normal)
    return folded
