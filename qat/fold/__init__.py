"""Convolutions with their BatchNorm folded in, one file a training strategy. `STRATEGIES` names them all."""

from qat.fold.base import FoldedConvBN
from qat.fold.callable import make_callable
from qat.fold.foldable import check_foldable
from qat.fold.strategies import STRATEGIES

__all__ = ["STRATEGIES", "FoldedConvBN", "check_foldable"]

make_callable(__name__)
