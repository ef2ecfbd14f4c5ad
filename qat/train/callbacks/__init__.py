"""The schedule of a run, one callback an event."""

from qat.train.callbacks.epoch_line import EpochLine
from qat.train.callbacks.finite_loss import FiniteLoss
from qat.train.callbacks.freeze_bn import FreezeBN
from qat.train.callbacks.freeze_ranges import FreezeRanges
from qat.train.callbacks.log_lr import LogLearningRate
from qat.train.callbacks.progress import progress
from qat.train.callbacks.quant_delay import QuantDelay
from qat.train.callbacks.record import Record
from qat.train.callbacks.reestimate import Reestimate
from qat.train.callbacks.rng_state import RngState
from qat.train.callbacks.run_checkpoint import RunCheckpoint
from qat.train.callbacks.stop_signal import StopSignal

__all__ = [
    "EpochLine",
    "FiniteLoss",
    "FreezeBN",
    "FreezeRanges",
    "LogLearningRate",
    "QuantDelay",
    "Record",
    "Reestimate",
    "RngState",
    "RunCheckpoint",
    "StopSignal",
    "progress",
]
