"""Integer grids, range estimators and the fake quantizer."""

from qat.quant.fake_quantizer import FakeQuantizer
from qat.quant.ranges import LOGIT_RANGES, RANGES
from qat.quant.spec import QuantSpec

__all__ = ["LOGIT_RANGES", "RANGES", "FakeQuantizer", "QuantSpec"]
