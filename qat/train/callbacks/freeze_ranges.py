"""Fix the activation ranges late in training, so that the last steps fit the weights to the grids they will ship with."""

import logging
from typing import Any

import qat
from qat.train.callbacks.at_step import AtStep

log = logging.getLogger(__name__)


class FreezeRanges(AtStep):
    """Freeze the ranges of activations after optimizer step `at`. The frozen state lives in the quantizers and their checkpoints.

    Ranges of weights go on following the weights: a frozen one would clip those that still grow.
    """

    key = "quant.freeze_ranges"

    def act(self, network: Any, step: int) -> None:
        qat.freeze_ranges(network, weights=False)
        log.info("step %d: activation ranges frozen", step)
