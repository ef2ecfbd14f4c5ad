"""reestimate_bn: BatchNorm statistics of the quantized network, pooled over batches [OSC, arXiv 2203.11086]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from qat.fold import FoldedConvBN
from qat.graph import lifecycle
from qat.graph.lifecycle import folded_layers
from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import StepReport


@torch.no_grad()
def reestimate_bn(prepared: QuantGraph, batches: Iterable[Any]) -> QuantGraph:
    """A copy of `prepared` with the statistics that `qat.reestimate_bn` gives; activation ranges stay.

    Raises:
        QATError: no batches.
    """
    changed, report = copy_of(prepared), StepReport("reestimate_bn")
    lifecycle.reestimate_bn(changed, batches)
    for (name, layer), before in zip(folded_layers(changed).items(), folded_layers(prepared).values()):
        if layer.bn is None:
            report.left.append((name, "its BatchNorm is gone"))
        else:
            report.done.append((name, _moved(before, layer)))
    changed.step_reports.append(report)
    return changed


def _moved(before: FoldedConvBN, after: FoldedConvBN) -> str:
    mean = float(((after.bn.running_mean - before.bn.running_mean).abs() / before.sigma).max())
    factor = float((after.sigma / before.sigma).log().abs().max().exp())
    return f"mean moved by up to {mean:.3g} sigma, sigma by a factor of up to {factor:.3g}"
