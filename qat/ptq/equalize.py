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
from qat.graph.prepared import QuantGraph
from qat.graph.report import StepReport
from qat.ptq.dead import clear_dead
from qat.ptq.float_graph import deviation, float_graph
from qat.ptq.layer import layers_of
from qat.ptq.links import Link, links_of, spread
from qat.ptq.relu6 import replace_clips

# A filter this much smaller than its layer's largest counts as dead: its bias would be blown up by the factor.
DEAD = 1e-6


def pair_scales(r1: Tensor, r2: Tensor) -> Tensor:
    """s (C) [WP21 eq. 22]; 1 for dead channels."""
    alive = _alive(r1) & _alive(r2)
    return torch.where(alive, (r1 / torch.where(alive, r2, 1)).sqrt(), 1)


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
    replace_relu6: bool | float = False,
    sweeps: int = 100,
    tolerance: float = 1e-3,
    overrides: dict[str, dict[str, Any]] | None = None,
    concrete_args: dict[str, Any] | None = None,
) -> QuantGraph:
    """A copy of a float network whose filters have like ranges; in evaluation it computes what `model` does.

    Only layers that nothing but the next layer reads are equalised, through ReLU, LeakyReLU, PReLU, pools and the like (`links.py`). The
    sweep over all pairs and triples is repeated until no factor differs from 1 by more than `tolerance`.

    Args:
        model: float network, its BatchNorms alive (they stay) or folded by `qat.fold`.
        example_inputs: tuple of positional inputs; not needed for a network from `qat.fold`, unless ReLU6 is replaced.
        replace_relu6: put ReLU in the place of ReLU6 between two layers: everywhere, or where at most this share of a tensor's values lies
            above 6, as the BatchNorm before it says. This changes the function; the report says by how much on example_inputs.
        overrides, concrete_args: as in `qat.fold`.

    Returns:
        the network; `.step_reports[-1]` says what was equalised and what was left, with the reason.

    Raises:
        QATError: a prepared network; no example_inputs where they are needed.
        CaptureError: the forward is no single graph.
    """
    graph = float_graph("equalize", model, example_inputs, overrides, concrete_args)
    layers, others = layers_of(graph)
    links, left = links_of(graph, layers)
    report = StepReport("equalize", left=others + left)
    replaced = [link for link in links if link.clips and _may_lose_clip(link, replace_relu6)]
    if replaced:
        clips = [node for link in replaced for node in link.clips]
        if example_inputs is None:
            found = "replace_relu6 without example_inputs"
            raise QATError("equalize", found, "inputs to measure on what it changes", "Pass example_inputs=(x,).")
        before = float_graph("equalize", graph, None)
        replace_clips(graph, clips)
        moved, largest = deviation(before, graph, example_inputs)
        shares = f"outputs move by at most {moved:.3g}, {moved / (largest or 1):.2%} of the largest"
        report.notes.append(f"ReLU6 replaced by ReLU at {len(clips)} places: {shares}")
    if kept := [link for link in links if link.clips and link not in replaced]:
        report.left += [(link.name, _why_kept(link, replace_relu6)) for link in kept]
        links = [link for link in links if link not in kept]
    report.done += clear_dead(links)
    totals = {link: torch.ones_like(link.first.output_ranges()) for link in links}
    spans = {link: _span(link) for link in links}
    groups = _groups(links)
    for _ in range(sweeps):
        if not max((_equalize(group, totals) for group in groups), default=0.0) > tolerance:
            break
    for link in links:
        s = totals[link]
        done = f"{int((s != 1).sum())} of {s.numel()} channels, factors {float(s.min()):.3g} to {float(s.max()):.3g}"
        report.done.append((link.name, f"{done}, largest filter to median {spans[link]:.3g} before, {_span(link):.3g} after"))
    graph.step_reports.append(report)
    return graph


def share_above(link: Link, limit: float = 6.0) -> float | None:
    """Share of the values of the first layer's channels above a limit, as its BatchNorm says; None where none told."""
    normal = link.first.normal
    if normal is None:
        return None
    mean, deviation = normal
    return float((1 - torch.special.ndtr((limit - mean) / deviation.clamp(min=torch.finfo(mean.dtype).tiny))).mean())


def _may_lose_clip(link: Link, allowed: bool | float) -> bool:
    if isinstance(allowed, bool):
        return allowed
    share = share_above(link)
    return share is not None and share <= allowed


def _why_kept(link: Link, allowed: bool | float) -> str:
    why = "ReLU6 between them is not positively homogeneous"
    if allowed is False:
        return f"{why}; replace_relu6=True puts ReLU in its place"
    share = share_above(link)
    return f"{why}, and {'an unknown share' if share is None else f'{share:.2%}'} of the values is above 6"


def _groups(links: list[Link]) -> list[tuple[Link, ...]]:
    """Triples around depthwise layers, and the links that belong to none, in graph order."""
    behind = {link.first: link for link in links}
    groups: list[tuple[Link, ...]] = []
    taken: set[Link] = set()
    for link in links:
        follower = behind.get(link.second)
        if link.second.is_depthwise and follower is not None and link.repeat == 1:
            groups.append((link, follower))
            taken |= {link, follower}
        elif link not in taken:
            groups.append((link,))
    return groups


def _equalize(group: tuple[Link, ...], totals: dict[Link, Tensor]) -> float:
    """Scale one pair or triple; the largest |log s|."""
    links = list(group)
    ranges = [links[0].first.output_ranges(), *(_input_ranges(link) for link in links)]
    scales = [pair_scales(*ranges)] if len(links) == 1 else list(triple_scales(*ranges))
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
