"""Convolutions with their BatchNorm folded in, one file a training strategy. `STRATEGIES` names them all."""

from qat.fold.base import FoldedConvBN
from qat.fold.bn_correction import BNCorrection
from qat.fold.callable import make_callable
from qat.fold.foldable import check_foldable
from qat.fold.naive import Naive
from qat.fold.static import Static

STRATEGIES: dict[str, type[FoldedConvBN]] = {
    "static": Static,
    "naive": Naive,
    "bn_correction": BNCorrection,
}

__all__ = ["STRATEGIES", "FoldedConvBN", "check_foldable"]

make_callable(__name__)
