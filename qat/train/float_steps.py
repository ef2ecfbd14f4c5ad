"""The post-training steps of a recipe that work on the float network, before it is prepared."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

import qat.ptq
from qat.graph.prepared import QuantGraph


def float_steps(
    network: nn.Module, example: Tensor, ptq: dict[str, Any], overrides: dict[str, Any] | None
) -> Iterator[tuple[str, QuantGraph]]:
    """(step, float network after it) of every step that `ptq` asks for.

    Args:
        example: images (N, C, H, W) on which reports say how much outputs move.
        ptq: that part of a recipe.
        overrides: those of its `quant` part.
    """
    if ptq["equalize"]:
        relu6 = {key: ptq[key] for key in ("within_relu6", "replace_relu6")}
        equalized = qat.ptq.equalize(network, (example,), **relu6, overrides=overrides)
        yield "equalize", equalized
        network = equalized
    if ptq["absorb_bias"]:
        yield "absorb_bias", qat.ptq.absorb_bias(network, (example,), overrides=overrides)
