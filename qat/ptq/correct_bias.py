"""Bias correction: quantized weights move the mean of every output channel; the bias takes that back [DFQ 1906.04721; WP21 sect. 3.3].

    b <- b - dW E[x]        dW = Q(W) - W

empirical: E[x] and what else moved are measured, b <- b + E[y] - E[y~], with y the float layer's output and y~ the quantized one's.
analytic: E[x] follows from the BatchNorm in front (known_means.py), the kernel summed over its taps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from qat.bars import progress_bar
from qat.choose import check_name
from qat.errors import QATError
from qat.fold import FoldedConvBN
from qat.fold.arithmetic import out_first
from qat.graph.lifecycle import check_calibrated, folded_layers, modes_restored
from qat.graph.prepared import QuantGraph, copy_of, each_batch, inputs_of
from qat.graph.report import StepReport
from qat.graph.stream import Stream, float_copy
from qat.ptq.chosen import chosen as chosen_by
from qat.ptq.known_means import Known, known_means

METHODS = ("empirical", "analytic")


@torch.no_grad()
def correct_bias(
    prepared: QuantGraph,
    batches: Iterable[Any] | None = None,
    *,
    method: str | None = None,
    layers: Sequence[str] | None = None,
    reference: QuantGraph | None = None,
    progress: bool = True,
) -> QuantGraph:
    """A copy of `prepared` whose biases make up for the shift that quantization gives the mean of each output channel.

    empirical: layer by layer in graph order, each with the layers before it quantized and corrected already. The change is the difference
        of the means over pictures and positions of its output before the activation, float network minus quantized network: what its
        own weights move (dW E[x]) and what its input moved. Left of it is at most half a step of the int32 bias, s_x s_w.
    analytic: from the statistics of the BatchNorms alone, without data: minus dW E[x]. Padding is ignored, as in the papers. A layer whose
        input's mean does not follow from a BatchNorm (behind a max-pool, an activation of a sum, the network's input) is left.

    The float function changes on purpose. A correction made before, by either method, is taken out first and is no part of the float
    network compared with: the same call twice gives the same biases. A layer without a bias gets one. `step_reports` tells how far
    each layer moved, and why others were left.

    Args:
        prepared: calibrated, for the empirical method. Untouched, and quantized as its switches are set.
        batches: items are a tensor or a tuple of the network's positional inputs; read once.
        method: empirical | analytic; by default the first with batches, the second without.
        layers: patterns (fnmatch) of the names of layers to correct; all when absent.
        reference: prepared network of the same graph whose float function is the one to come near: that from before `adaround`, which
            leaves no float weights. `prepared` itself when absent.
        progress: show a bar on a terminal.

    Raises:
        ConfigError: unknown method.
        QATError: a float network; no range yet; no batches, or outputs with NaN or Inf; batches for the analytic method; a pattern that
            matches no layer; a reference of another graph.
    """
    method = check_name("correct_bias", method or ("analytic" if batches is None else "empirical"), METHODS)
    if not isinstance(prepared, QuantGraph) or not folded_layers(prepared):
        raise QATError(
            "correct_bias", f"a {type(prepared).__name__} without quantized layers", "a prepared network", "Call qat.prepare first."
        )
    if (batches is None) != (method == "analytic"):
        found = f"{'no batches' if batches is None else 'batches'} for method='{method}'"
        todo = "Pass batches to measure on, or leave them out and correct from the BatchNorms."
        raise QATError("correct_bias", found, "batches for the empirical method alone", todo)
    if reference is not None:
        _check_reference(prepared, reference)
    corrected, report = copy_of(prepared), StepReport(f"correct_bias ({method})")
    chosen = chosen_by("correct_bias", folded_layers(corrected), layers)
    report.left += [(name, "not asked for") for name in folded_layers(corrected) if name not in chosen]
    calls = Counter(str(node.target) for node in corrected.graph.nodes if node.op == "call_module")
    created = {name for name, layer in chosen.items() if attrgetter(layer.bias_key)(layer) is None}
    for name, layer in list(chosen.items()):
        layer.undo_bias_correction()
        if reason := _nothing_to_correct(layer, calls[name]):
            report.left.append((name, reason))
            del chosen[name]
    with modes_restored(corrected), progress_bar(progress) as bar:
        task = bar.add_task("correct_bias", total=len(chosen))
        corrected.eval()
        if batches is None:
            steps = _analytic(corrected, chosen, report, folded_layers(reference or prepared))
        else:
            steps = _empirical(corrected, chosen, batches, float_copy(reference or prepared))
        for name, change, std in steps:
            bar.advance(task)
            if not bool(change.any()):
                report.left.append((name, "the mean of its output does not move"))
                continue
            chosen[name].correct_bias(change)
            report.done.append((name, _moved(change, std) + (", bias created" if name in created else "")))
    corrected.step_reports.append(report)
    return corrected


Step = tuple[str, Tensor, Tensor | None]  # a layer, the change of its bias (C_out), and the standard deviation of its output where known


def _empirical(network: QuantGraph, chosen: dict[str, FoldedConvBN], batches: Iterable[Any], exact: QuantGraph) -> Iterator[Step]:
    check_calibrated(network, switched_off=False)
    wanted = {name: _Moments(layer) for name, layer in chosen.items()}
    stream = Stream([network], _measured_in_float(exact, wanted, batches))
    for stop in stream:
        if stop.name not in chosen:
            continue
        layer = stop.layers[0]
        found, bias = _Moments(layer), layer.folded()[1]
        rounded = bias
        for x in stream.inputs():
            y, rounded = layer.integer_layer(x)
            found.add(y)
        if not found.count:
            raise QATError(stop.name, "only batches without pictures", "at least one picture", "Leave such batches out.")
        # The mean has the bias rounded to the grid of int32 in it; the correction starts from the bias itself.
        change = wanted[stop.name].mean - found.mean + (rounded - bias).double()
        if not bool(torch.isfinite(change).all()):
            raise QATError(stop.name, "an output with NaN or Inf", "finite outputs on these batches", "Leave those batches out.")
        yield stop.name, change, wanted[stop.name].std


def _measured_in_float(exact: QuantGraph, wanted: dict[str, _Moments], batches: Iterable[Any]) -> Iterator[Any]:
    """The batches, each of which goes through the float network when it is asked for."""
    for name, layer in folded_layers(exact).items():
        layer.undo_bias_correction()
        if name in wanted:
            layer.register_forward_hook(lambda _, inputs, output, moments=wanted[name]: moments.add(output))
    for batch in each_batch(batches):
        exact(*inputs_of(exact, batch))
        yield batch


def _check_reference(prepared: QuantGraph, reference: QuantGraph) -> None:
    def shapes(network: QuantGraph) -> Any:
        layers = {name: layer.weight_to_quantize().shape for name, layer in folded_layers(network).items()}
        return [(node.op, node.name) for node in network.graph.nodes], layers

    if not isinstance(reference, QuantGraph) or shapes(prepared) != shapes(reference):
        found, expected = "a network of another graph", "the prepared network from before"
        raise QATError("correct_bias.reference", found, expected, "Keep the network that adaround was given.")


class _Moments:
    """Mean and standard deviation, (C_out) each, of a layer's output before its activation over the pictures and positions of batches."""

    def __init__(self, layer: FoldedConvBN):
        self._rank = layer.weight_to_quantize().dim()
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, y: Tensor) -> None:
        channels = y.dim() + 1 - self._rank  # of a linear layer the last axis
        others = [d for d in range(y.dim()) if d != channels]
        self.count += y.numel() // y.shape[channels]
        norms = torch.linalg.vector_norm(y, dim=others, dtype=torch.float64)
        self._sums.append(torch.stack((y.sum(others, dtype=torch.float64), norms.square())))

    @property
    def mean(self) -> Tensor:
        return torch.stack(self._sums).sum(0)[0] / self.count

    @property
    def std(self) -> Tensor:
        return (torch.stack(self._sums).sum(0)[1] / self.count - self.mean.square()).clamp(min=0).sqrt()


def _analytic(network: QuantGraph, chosen: dict[str, FoldedConvBN], report: StepReport, exact: dict[str, FoldedConvBN]) -> Iterator[Step]:
    known = known_means(network)
    for node in network.graph.nodes:
        name = str(node.target)
        if node.op != "call_module" or name not in chosen:
            continue
        change = _expected_shift(chosen[name], exact[name], node, known)
        if isinstance(change, str):
            report.left.append((name, change))
            continue
        output = known[node]
        yield name, -change, output.std if isinstance(output, Known) else None


def _expected_shift(layer: FoldedConvBN, exact: FoldedConvBN, node: fx.Node, known: dict[fx.Node, Known | str]) -> Tensor | str:
    """dW E[x], (C_out), with dW the layer's quantized weights less the float ones of `exact`; or why E[x] is not known."""
    source: Any = node.args[0]
    x, weight = known[source], layer.weight_to_quantize()
    if isinstance(x, str):
        return x
    groups = getattr(layer.conv, "groups", 1)
    rank = len(getattr(source.meta.get("tensor_meta"), "shape", ()))
    if rank != max(weight.dim(), 2) or x.mean.numel() != weight.shape[1] * groups:
        return "its channels are not those of a BatchNorm"
    moved = out_first(layer.quantized()[0].double() - exact.folded()[0].double(), layer.conv)
    taps = moved.flatten(2).sum(2) if moved.dim() > 2 else moved
    if getattr(layer.conv, "transposed", False):
        taps = taps / math.prod(layer.conv.stride)  # each position of the output sees one in so many of the taps
    return (taps.unflatten(0, (groups, -1)) @ x.mean.view(groups, -1, 1)).flatten()


def _nothing_to_correct(layer: FoldedConvBN, calls: int) -> str | None:
    if layer.weight_quantizer is None:
        return "no weight quantizer"
    if not layer.weight_quantizer.enabled:
        return "its weight quantization is switched off"
    return f"called at {calls} places, which one bias cannot serve" if calls > 1 else None


def _moved(change: Tensor, std: Tensor | None) -> str:
    """How far at most, in root mean square standard deviations of the output's channels where they are known."""
    most = float(change.abs().max())
    if std is None or not bool(std.any()):
        return f"bias moved by up to {most:.3g}"
    return f"bias moved by up to {most / float(std.square().mean().sqrt()):.3g} standard deviations of the output"
