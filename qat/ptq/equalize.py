"""equalize: ranges of the filters made alike across layers, before weights get one scale for all of them.

Source: [DFQ] arXiv 1906.04721, sect. 4.1; [WP21] arXiv 2106.08295, eq. 20-22.

    pair      s_i = sqrt(r1_i / r2_i)          W1 <- W1 / s    b1 <- b1 / s    W2 <- W2 s
    triple    s12_i = r1_i / cbrt(r1_i r2_i r3_i)    s23_i = cbrt(r1_i r2_i r3_i) / r3_i
              W1 <- W1 / s12    b1 <- b1 / s12    W2 <- W2 s12 / s23    b2 <- b2 / s23    W3 <- W3 s23

r1_i: largest magnitude in row i of the folded W1; r2_i: in what reads channel i; in a triple the middle layer is depthwise. All weights
are those with the BatchNorm folded in; a live BatchNorm takes the factors of its layer's rows in gamma and beta, so that training goes on
with statistics that are still true.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.graph.prepared import QuantGraph, copy_of
from qat.graph.report import StepReport
from qat.ptq.dead import clear_dead
from qat.ptq.float_graph import deviation, float_graph, keeps_whole
from qat.ptq.layer import layers_of
from qat.ptq.links import Link, links_of, spread
from qat.ptq.relu6 import replace_clips

# A filter this much smaller than its layer's largest counts as dead: its bias would be blown up by the factor.
DEAD = 1e-6
# ReLU6, and how many standard deviations above its mean a channel is taken to end.
_LIMIT, _DEVIATIONS = 6.0, 4.0
_WHY_NOT = "ReLU6 between them is not positively homogeneous; replace_relu6=True puts ReLU in its place"


def pair_scales(r1: Tensor, r2: Tensor) -> Tensor:
    """s (C) [WP21 eq. 22]; 1 for dead channels."""
    alive = _alive(r1) & _alive(r2)
    return torch.where(alive, r1.sqrt() / torch.where(alive, r2, 1).sqrt(), 1)  # r1 / r2 might overflow


def triple_scales(r1: Tensor, r2: Tensor, r3: Tensor) -> tuple[Tensor, Tensor]:
    """(s12, s23), (C) each; where one end is dead, the other pair alone; 1 for channels that have no pair alive."""
    alive = _alive(r1) & _alive(r2) & _alive(r3)
    mean = torch.stack([torch.where(alive, r, 1).log() for r in (r1, r2, r3)]).mean(0).exp()
    return torch.where(alive, r1 / mean, pair_scales(r1, r2)), torch.where(alive, mean / torch.where(alive, r3, 1), pair_scales(r2, r3))


@torch.no_grad()
def equalize(
    model: nn.Module,
    example_inputs: tuple | None = None,
    *,
    replace_relu6: bool = False,
    within_relu6: bool = False,
    sweeps: int = 100,
    tolerance: float = 1e-3,
    overrides: dict[str, dict[str, Any]] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> QuantGraph:
    """A copy of a float network whose filters have like ranges; in evaluation it computes what `model` does.

    Weights that read only channels that are 0 for all inputs of magnitude up to 1000 are set to 0 first (`dead.py`).

    Only layers that nothing but the next layer reads are equalised, through ReLU, LeakyReLU, PReLU, pools and the like (`links.py`). The
    sweep over all pairs and triples is repeated until no factor differs from 1 by more than `tolerance`.

    Args:
        model: float network, its BatchNorms alive (they stay) or folded by `qat.fold`.
        example_inputs: tuple of positional inputs; not needed for a network from `qat.fold`, unless ReLU6 is replaced.
        replace_relu6: put ReLU in the place of ReLU6 between two layers. This changes the function; the report says by how much on
            example_inputs.
        within_relu6: leave ReLU6, and scale through it only channels that stay below 6, before and after, as their BatchNorm says (mean
            and 4 standard deviations). The function stays as far as that is true; the report says by how much outputs move
            on example_inputs.
        overrides, concrete_args: as in `qat.fold`.

    Returns:
        the network; `.step_reports[-1]` says what was equalised and what was left, with the reason.

    Raises:
        QATError: a prepared network; no example_inputs where they are needed; ReLU6 both replaced and left.
        CaptureError: the forward is no single graph.
    """
    if replace_relu6 and within_relu6:
        raise QATError("equalize", "replace_relu6 and within_relu6", "one of the two", "Leave replace_relu6 out.")
    if not isinstance(sweeps, int) or sweeps < 1 or not isinstance(tolerance, (int, float)):
        found = f"sweeps={sweeps!r}, tolerance={tolerance!r}"
        raise QATError("equalize", found, "a whole number from 1 on and a number", "Leave them out.")
    graph = float_graph("equalize", model, example_inputs, overrides, concrete_args)
    layers, others = layers_of(graph, keeps_whole(overrides))
    links, left = links_of(graph, layers)
    report = StepReport("equalize", left=others + left)
    clipped = [link for link in links if link.clips]
    if clipped and replace_relu6:
        if example_inputs is None:
            found = "replace_relu6 without example_inputs"
            raise QATError("equalize", found, "inputs to measure on what it changes", "Pass example_inputs=(x,).")
        clips = [node for link in clipped for node in link.clips]
        before = copy_of(graph)
        replace_clips(graph, clips)
        report.notes.append(f"ReLU6 replaced by ReLU at {len(clips)} places: {deviation(before, graph, example_inputs)}")
        clipped = []
    free = {link: below(link) for link in clipped if within_relu6 and link.bounded and link.first.normal is not None}
    for link in clipped:
        if link not in free:
            links.remove(link)
            unknown = f"no BatchNorm told what of '{link.first.name}' is below 6" if link.bounded else "values may grow in front of a ReLU6"
            report.left.append((link.name, unknown if within_relu6 else _WHY_NOT))
    unscaled = copy_of(graph) if free and example_inputs is not None else None
    report.done += clear_dead(links)
    totals = {link: torch.ones_like(link.first.output_ranges()) for link in links}
    spans = {link: _span(link) for link in links}
    groups = _groups(links, free)
    for _ in range(sweeps):
        change = max((_equalize(group, totals, free) for group in groups), default=0.0)
        if change <= tolerance:
            break
    else:
        report.notes.append(f"stopped after {sweeps} sweeps, where factors still change by up to {math.expm1(change):.2%}")
    if unscaled is not None and example_inputs is not None:
        report.notes.append(f"ReLU6 left at {sum(len(link.clips) for link in free)} places: {deviation(unscaled, graph, example_inputs)}")
    for link in links:
        s = totals[link]
        done = f"{int((s != 1).sum())} of {s.numel()} channels, factors {float(s.min()):.3g} to {float(s.max()):.3g}"
        report.done.append((link.name, f"{done}, largest filter to median {spans[link]:.3g} before, {_span(link):.3g} after"))
    graph.step_reports.append(report)
    return graph


def below(link: Link) -> Tensor:
    """Which channels of the first layer stay below the ReLU6 behind it, (C) bool."""
    return _reach(link) < _LIMIT


def _reach(link: Link) -> Tensor:
    """What a channel of the first layer hardly ever exceeds, as its BatchNorm says, (C)."""
    assert link.first.normal is not None
    mean, deviation = link.first.normal
    return mean + _DEVIATIONS * deviation


def _groups(links: list[Link], free: dict[Link, Tensor]) -> list[tuple[Link, ...]]:
    """Triples around depthwise layers, and the links that belong to none, in graph order; a link with a limit is a pair."""
    behind = {link.first: link for link in links}
    groups: list[tuple[Link, ...]] = []
    taken: set[Link] = set()
    for link in links:
        follower = behind.get(link.second)
        if link.second.is_depthwise and follower is not None and link.repeat == 1 and not {link, follower} & free.keys():
            groups.append((link, follower))
            taken |= {link, follower}
        elif link not in taken:
            groups.append((link,))
    return groups


def _equalize(group: tuple[Link, ...], totals: dict[Link, Tensor], free: dict[Link, Tensor]) -> float:
    """Scale one pair or triple; the largest |log s|.

    Args:
        free: which channels may be scaled below a limit, of the links that have one.
    """
    links = list(group)
    ranges = [links[0].first.output_ranges(), *(_input_ranges(link) for link in links)]
    scales = [pair_scales(*ranges)] if len(links) == 1 else list(triple_scales(*ranges))
    if links[0] in free:
        scales = [torch.where(free[links[0]], torch.maximum(scales[0], _reach(links[0]) / _LIMIT), 1)]
    for link, s in zip(links, scales):
        link.first.scale_outputs(1 / s)
        link.second.scale_inputs(spread(s, link.repeat))
        totals[link] = totals[link] * s
    return max(float(s.log().abs().max()) for s in scales)


def _input_ranges(link: Link) -> Tensor:
    return link.second.input_ranges().view(-1, link.repeat).amax(1)


def _alive(ranges: Tensor) -> Tensor:
    return torch.isfinite(ranges) & (ranges > DEAD * ranges.max())


def _span(link: Link) -> float:
    ranges = link.first.output_ranges()
    median = float(ranges.median())
    return float(ranges.max()) / median if median else math.inf
