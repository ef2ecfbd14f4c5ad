"""reestimate_bn: BatchNorm statistics of the quantized network, pooled over batches [OSC, arXiv 2203.11086]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.graph import lifecycle
from qat.graph.left_norm import LeftBatchNorm
from qat.graph.lifecycle import folded_layers
from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import StepReport


@torch.no_grad()
def reestimate_bn(prepared: QuantGraph, batches: Iterable[Any]) -> QuantGraph:
    """A copy of `prepared` with the statistics that `qat.reestimate_bn` gives; activation ranges stay.

    Bias corrections are taken out first: statistics of the quantized network take the same shift of the means out a second time.

    Raises:
        QATError: a float network; no batches; NaN or Inf in the statistics they give.
    """
    if not isinstance(prepared, QuantGraph) or not folded_layers(prepared):
        found = f"a {type(prepared).__name__} without quantized layers"
        raise QATError("reestimate_bn", found, "a prepared network", "Call qat.prepare first.")
    changed, report = copy_of(prepared), StepReport("reestimate_bn")
    for layer in folded_layers(changed).values():
        layer.undo_bias_correction()
    lifecycle.reestimate_bn(changed, batches)
    for (name, layer), before in zip(folded_layers(changed).items(), folded_layers(prepared).values()):
        if layer.bn is None:
            gone = name in dict(prepared.fold_report.folded)
            report.left.append((name, "its BatchNorm is gone" if gone else "it has no BatchNorm"))
        else:
            report.done.append((name, _moved(before, layer)))
    left = [name for name, module in changed.named_modules() if isinstance(module, LeftBatchNorm)]
    report.done += [(name, "not folded; re-estimated as well") for name in left]
    changed.step_reports.append(report)
    return changed


def _moved(before: FoldedConvBN, after: FoldedConvBN) -> str:
    mean = float(((after.bn.running_mean - before.bn.running_mean).abs() / before.sigma).max())
    factor = float((after.sigma / before.sigma).log().abs().max().exp())
    return f"mean moved by up to {mean:.3g} sigma, sigma by a factor of up to {factor:.3g}"
