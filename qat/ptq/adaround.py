"""AdaRound: each weight is rounded up or down as its layer's output asks for, not to the nearest [AR, arXiv 2004.10568].

Layer by layer in the order of the graph, with the equations of `rounding.py`:

    minimise over V   || act(W x + b) - act(W~ x^ + b^) ||^2 + lambda f(V)        [eq. 25]

x is the layer's input in the float network; x^ that in the quantized one, whose layers before are rounded already; act is the activation
fused with the layer; b^ is the bias as inference rounds it. The norm is summed over output channels, a mean over pictures and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from qat.bars import progress_bar
from qat.errors import QATError
from qat.fold.arithmetic import per_row
from qat.graph.kinds import is_activation_node, module_of
from qat.graph.lifecycle import check_calibrated, folded_layers, modes_restored
from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import StepReport
from qat.graph.stream import Stop, Stream, float_copy
from qat.ptq.chosen import chosen
from qat.ptq.product import NoProductError
from qat.ptq.reconstruction import Activation, draw
from qat.ptq.rounding import both_roundings, check_grid, hard_codes, start
from qat.ptq.settings import Settings


def adaround(
    prepared: QuantGraph,
    batches: Iterable[Any],
    *,
    iterations: int = 1000,
    batch_size: int = 32,
    lr: float = 1e-2,
    regularisation: float = 10.0,
    warm_up: float = 0.2,
    beta: tuple[float, float] = (20.0, 2.0),
    seed: int = 0,
    layers: Sequence[str] | None = None,
    progress: bool = True,
) -> QuantGraph:
    """A copy of `prepared` whose weights are on their grid, each rounded up or down so that its layer's output errs least.

    Scales, biases and activation ranges are those of `prepared`; what `correct_bias` gave a bias, for the rounding before, is taken out.
    The weight scales of the layers rounded are held afterwards (`freeze_ranges`), so that the weights stay on their grid. A layer keeps
    nearest rounding where the other is no better on the samples. A second run changes nothing: weights on the grid have one rounding.
    Where the int32 bias of a channel does not fit at its scale, `convert` raises that scale and rounds the channel's codes once more.

    Of each layer some ten thousand samples are looked at: random positions of its output in all pictures, drawn once. Between layers the
    tensors that later layers read are held for all pictures, in the float and in the quantized network.

    Args:
        prepared: calibrated; of any strategy. Left untouched.
        batches: items are a tensor or a tuple of the network's positional inputs. Read once; 1024 pictures in the paper.
        iterations: steps of Adam for each layer; 10000 in the paper.
        batch_size: a step looks at as many samples as so many pictures have, 64 of each at most; fewer where channels have few weights.
        lr: of V.
        regularisation: lambda, in units of what moving a weight by one step changes in its output channel, squared, on average over the
            channel's weights. (The paper's 0.01 is in units of the outputs squared: layers with large outputs are then rounded before their
            weights are decided, and those with small ones decided by the regulariser alone.)
        warm_up: share of the iterations without the regulariser.
        beta: its exponent after them and at the end.
        seed: of the positions and of the minibatches.
        layers: patterns (fnmatch) of the layers to round; all when absent. The others stay as they are.
        progress: show a bar on standard error where that is a terminal.

    Returns:
        the copy. Its last `step_reports` entry has a line for each layer: the error of its output, as a share of the output's power, by
        nearest rounding and by this; and the share of weights rounded the other way.

    Raises:
        QATError: a network that is not prepared or not calibrated; no batches; NaN or Inf in front of a layer; a pattern that matches no
            layer; settings out of range.
    """
    settings = Settings(iterations, batch_size, lr, regularisation, warm_up, beta)
    check_calibrated(prepared)
    asked = chosen("adaround", folded_layers(prepared), layers)
    generator = torch.Generator().manual_seed(seed)
    rounded = copy_of(prepared)
    for layer in folded_layers(rounded).values():
        layer.undo_bias_correction()
    report = StepReport("adaround")
    with modes_restored(rounded), progress_bar(progress) as bar:
        task = bar.add_task("adaround", total=iterations * len(folded_layers(rounded)))
        stream = Stream([rounded.eval(), float_copy(rounded)], batches)
        for number, stop in enumerate(stop for stop in stream if not stop.call):
            bar.update(task, description=f"adaround {stop.name}", completed=iterations * number)
            why_not = _why_not(stop, asked)
            if why_not is None:
                try:
                    done = _round(rounded, stop, stream, settings, generator, lambda: bar.advance(task))
                    report.done.append((stop.name, f"{done}{'; by the first of its calls' if stop.calls > 1 else ''}"))
                except NoProductError as error:
                    why_not = str(error)
            if why_not is not None:
                report.left.append((stop.name, why_not))
    rounded.step_reports.append(report)
    return rounded


def _why_not(stop: Stop, asked: Container[str]) -> str | None:
    """Why a layer stays as it is."""
    quantizer: Any = stop.layers[0].weight_quantizer
    if stop.name not in asked:
        return "not asked for"
    if quantizer is None:
        return "no weight quantizer"
    if not quantizer.enabled:
        return "its weight quantization is switched off"
    return None if quantizer.spec.symmetric else "its weights are on an asymmetric grid"


@torch.no_grad()
def _round(network: QuantGraph, stop: Stop, stream: Stream, settings: Settings, generator: torch.Generator, tick: Callable[[], Any]) -> str:
    """Set the weights of the layer at `stop`; what was done, in words."""
    layer, exact = stop.layers
    quantizer, weight = layer.integer_quantizer(), layer.weight_to_quantize().detach().clone()
    scale, nearest = quantizer.qparams_for(weight)[0], quantizer.codes(weight)
    problem = draw(stream, (layer, exact), scale, fused_activation(stop.node, network), settings.batch_size, generator)
    if not bool(problem.finite & torch.isfinite(weight).all()):
        todo = "Leave such batches out, or look at the layers before it."
        raise QATError(stop.name, "NaN or Inf in its input or weights", "finite numbers", todo)
    lower, up = both_roundings(weight, scale, quantizer.spec)
    best = hard_codes(lower, up, problem.solve(start(weight, scale), lower, up, settings, generator, tick))
    before, after = float(problem.error(nearest)), float(problem.error(best))
    codes = best if after < before else nearest
    check_grid(stop.name, codes, weight, scale, quantizer.spec)
    layer.freeze_ranges()
    layer.write_weight(codes * (per_row(scale, codes) if scale.dim() else scale))
    if not torch.equal(quantizer.codes(layer.weight_to_quantize()), codes):
        todo = "Its gamma / sigma is too near 0: leave it out of `layers`, or prepare with fold='static'."
        raise QATError(stop.name, "weights that do not give the codes they were written for", "the codes chosen", todo)
    power = float(problem.power()) or 1.0
    other = float((best != nearest).float().mean())
    if codes is nearest:
        return (
            f"nearest rounding kept: error {before / power:.3g} of the output's power ({after / power:.3g} with {other:.1%} the other way)"
        )
    return f"error {before / power:.3g} -> {after / power:.3g} of the output's power, {other:.1%} of the weights rounded the other way"


def fused_activation(node: fx.Node, network: fx.GraphModule) -> Activation:
    """What the graph computes from a layer's output (R, C_out) before it is quantized: its only reader, if that is an activation."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    modules = dict(network.named_modules(remove_duplicate=False))
    if reader is None or not is_activation_node(reader, modules) or reader.all_input_nodes != [node]:
        return lambda y: y
    module = module_of(reader, modules)

    def activation(y: Tensor) -> Tensor:
        args: Any = fx.map_arg(reader.args, lambda _: y)
        kwargs: Any = fx.map_arg(reader.kwargs, lambda _: y)
        if reader.op == "call_method":
            return getattr(args[0], str(reader.target))(*args[1:], **kwargs)
        target: Any = module if module is not None else reader.target
        return target(*args, **kwargs)

    return activation
