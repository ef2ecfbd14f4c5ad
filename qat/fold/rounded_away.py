"""Which channels one weight scale for the whole tensor rounds to nothing."""

from __future__ import annotations

import torch

from qat.fold.base import FoldedConvBN
from qat.quant import FakeQuantizer

# Below this share of the median channel's largest weight a channel is dead of itself, whatever the scale.
_DEAD = 1e-3


@torch.no_grad()
def rounded_away(layer: FoldedConvBN) -> list[int]:
    """Live output channels whose integers are all 0: a variance near 0 makes one filter so large that the others vanish."""
    quantizer = layer.weight_quantizer
    if not isinstance(quantizer, FakeQuantizer) or quantizer.spec.per_channel or not quantizer.enabled:
        return []
    weight = layer.weight_to_quantize()
    sizes = weight.abs().flatten(1).amax(1)
    if not bool((sizes > 0).any()):
        return []
    empty = (quantizer.codes(weight) == 0).flatten(1).all(1)
    return (empty & (sizes > _DEAD * sizes[sizes > 0].median())).nonzero().flatten().tolist()


def describe_rounded_away(name: str, channels: list[int]) -> str:
    shown = f"{channels[:8]}{' and more' if len(channels) > 8 else ''}"
    todo = "use QuantSpec(per_channel=True), or weight_range='lsq' with qat.search_weight_ranges"
    return f"{name}: its one weight scale rounds all weights of channels {shown} to 0; {todo}"
