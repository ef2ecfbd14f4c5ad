"""Capture, match, place, prepare, fold; and the life of a prepared network."""

from qat.graph.config import QATConfig
from qat.graph.fold import fold
from qat.graph.lifecycle import calibrate, freeze_bn, freeze_ranges, reestimate_bn, refold, set_fake_quant
from qat.graph.load_float import load_float
from qat.graph.prepare import prepare
from qat.graph.range_search import search_weight_ranges
from qat.graph.report import FoldReport

__all__ = [
    "FoldReport",
    "QATConfig",
    "calibrate",
    "fold",
    "freeze_bn",
    "freeze_ranges",
    "load_float",
    "prepare",
    "reestimate_bn",
    "refold",
    "search_weight_ranges",
    "set_fake_quant",
]
