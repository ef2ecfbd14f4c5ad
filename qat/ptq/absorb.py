"""absorb_bias: what a channel is always above moves into the bias of the next layer.

Source: [DFQ] arXiv 1906.04721, sect. 4.1.3; [WP21] arXiv 2106.08295, eq. 23-24.

    c = max(0, beta - 3 |gamma|)        b1 <- b1 - c        b2 <- b2 + W2 c

beta, |gamma|: mean and standard deviation of the first layer's output, as its BatchNorm says (`normal_output`). A ReLU passes the shift
for the 99.87 % of a normal distribution that lie above c; the activation's range gets smaller, so that its integers get finer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import StepReport
from qat.ptq.float_graph import deviation, float_graph, keeps_whole
from qat.ptq.layer import layers_of
from qat.ptq.links import links_of, spread


def absorbed(mean: Tensor, deviation: Tensor) -> Tensor:
    """c (C) [WP21 eq. 23]."""
    return (mean - 3 * deviation).clamp(min=0)


@torch.no_grad()
def absorb_bias(
    model: nn.Module,
    example_inputs: tuple | None = None,
    *,
    overrides: dict[str, dict[str, Any]] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> QuantGraph:
    """A copy of a float network in which high biases are absorbed by the next layers.

    Where the next layer pads with zeros the border would see a shift that the rest does not: such layers are left, and so are those
    behind a ReLU6. The next layer's BatchNorm, if it is alive, follows in its running mean.

    Args:
        model, example_inputs, overrides, concrete_args: as in `equalize`; with example_inputs the report says by how much outputs move.

    Returns:
        the network; `.step_reports[-1]` says what was absorbed and what was left, with the reason.

    Raises:
        QATError, CaptureError: as `equalize`.
    """
    graph = float_graph("absorb_bias", model, example_inputs, overrides, concrete_args)
    before = graph if example_inputs is None else copy_of(graph)
    layers, others = layers_of(graph, keeps_whole(overrides))
    links, left = links_of(graph, layers)
    report = StepReport("absorb_bias", left=others + left)
    for link in links:
        normal = link.first.normal
        if link.clips:
            report.left.append((link.name, "ReLU6 between them clips a shifted channel elsewhere"))
        elif link.no_shift:
            report.left.append((link.name, link.no_shift))
        elif normal is None:
            report.left.append((link.name, f"no BatchNorm told the distribution of '{link.first.name}'"))
        else:
            c = absorbed(*normal)
            if not bool(c.any()):
                report.left.append((link.name, "no channel lies always above 0"))
                continue
            link.first.shift_outputs(-c)
            link.second.follow_inputs(spread(-c, link.repeat))
            report.done.append((link.name, f"{int((c > 0).sum())} of {c.numel()} channels, up to {float(c.max()):.3g}"))
    if example_inputs is not None:
        report.notes.append(deviation(before, graph, example_inputs))
    graph.step_reports.append(report)
    return graph
