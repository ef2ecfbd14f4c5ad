"""The training strategies by name. All have the same inference graph; swapping one is swapping a word."""

import inspect

from qat.fold.base import FoldedConvBN
from qat.fold.batch_renorm import BatchRenorm
from qat.fold.bn_correction import BNCorrection
from qat.fold.frozen import Frozen
from qat.fold.moving_average import MovingAverage
from qat.fold.naive import Naive
from qat.fold.scale_merge import ScaleMerge
from qat.fold.single_pass import SinglePass
from qat.fold.static import Static

STRATEGIES: dict[str, type[FoldedConvBN]] = {
    "static": Static,
    "frozen": Frozen,
    "naive": Naive,
    "moving_average": MovingAverage,
    "batch_renorm": BatchRenorm,
    "bn_correction": BNCorrection,
    "single_pass": SinglePass,
    "scale_merge": ScaleMerge,
}


def strategy_options(name: str) -> list[str]:
    """Keyword arguments of a strategy beyond the layer, its BatchNorm and its quantizer."""
    return [p.name for p in inspect.signature(STRATEGIES[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
