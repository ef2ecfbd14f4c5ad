"""The float network a post-training step works on: a captured copy, its BatchNorms alive or folded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph.capture import capture
from qat.graph.config import QATConfig
from qat.graph.prepare import check_overrides
from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import FoldReport
from qat.quant import FakeQuantizer


def float_graph(
    step: str,
    model: nn.Module,
    example_inputs: tuple | None,
    overrides: dict[str, dict[str, Any]] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> QuantGraph:
    """A copy of a float network as a graph: of one that `qat.fold` or a step gave as it is, of any other as `capture` sees it.

    Raises:
        QATError: a prepared network; a network that is no graph yet, without example_inputs.
        CaptureError: the forward is no single graph.
    """
    if any(isinstance(m, (FoldedConvBN, FakeQuantizer)) for m in model.modules()):
        raise QATError(step, "a prepared network", "a float network", f"Call qat.ptq.{step} before qat.prepare.")
    if isinstance(model, QuantGraph) and model.meta.get("converted"):
        raise QATError(step, "a converted network", "a float network", f"Call qat.ptq.{step} before qat.prepare.")
    config = QATConfig(overrides={} if overrides is None else overrides)
    if isinstance(model, QuantGraph):
        check_overrides(model, model, config)
        return copy_of(model)
    if example_inputs is None:
        todo = "Pass example_inputs=(x,), or a network from qat.fold."
        raise QATError(step, f"{type(model).__name__} without example_inputs", "a batch to capture it with", todo)
    graph, notes = capture(model, example_inputs, config.keeps_whole, concrete_args)
    check_overrides(model, graph, config)
    return QuantGraph.finished(graph, FoldReport(notes=notes), model)


def keeps_whole(overrides: dict[str, dict[str, Any]] | None) -> Callable[[str], bool]:
    """What `overrides` say of a module by its qualified name."""
    return QATConfig(overrides={} if overrides is None else overrides).keeps_whole


def deviation(before: fx.GraphModule, after: fx.GraphModule, inputs: tuple) -> str:
    """How far at most the outputs of two networks in evaluation lie apart, in words."""
    with torch.no_grad():
        pairs = [(a, b) for a, b in zip(*(_tensors(copy_of(network).eval()(*inputs)) for network in (before, after)), strict=True)]
    moved = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    largest = max((float(a.abs().max()) for a, _ in pairs), default=0.0)
    return f"outputs move by at most {moved:.3g}, {moved / (largest or 1):.2%} of the largest"


def _tensors(outputs: Any) -> list[Tensor]:
    return [x.double() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.numel()]
