"""Channels that are always 0, whose readers' weights mean nothing but still widen a range.

A filter whose weights have died leaves a constant; where that is below 0, the ReLU behind it gives 0 whatever the picture. The variance of
what is computed from it is 0 as well, so that the next BatchNorm's gamma / sigma, and with it the folded filter, is huge.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat.ptq.layer import Layer
from qat.ptq.links import Link, spread

# An input of this magnitude at every weight does not lift a dead channel above 0.
REACH = 1000.0


def always_zero(layer: Layer) -> Tensor:
    """Which outputs of a layer with a ReLU behind it are 0 for all inputs of magnitude up to REACH, (C_out) bool."""
    weight, bias = layer.folded()
    return bias < -REACH * weight.abs().flatten(1).sum(1)


@torch.no_grad()
def clear_dead(links: list[Link]) -> list[tuple[str, str]]:
    """Set to 0 the weights that read only channels that are always 0, in graph order; the layers changed, and in how many channels."""
    changed = []
    for link in links:
        dead = spread(always_zero(link.first), link.repeat) if link.gives_zero else None
        if dead is not None and bool((dead & (link.second.input_ranges() > 0)).any()):
            link.second.scale_inputs((~dead).to(link.second.conv.weight.dtype))
            changed.append((link.second.name, f"weights of {int(dead.sum())} inputs that are always 0 set to 0"))
    return changed
