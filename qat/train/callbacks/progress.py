"""What a person watching sees: a bar on a terminal, a line an epoch elsewhere."""

import sys

from pytorch_lightning import Callback
from pytorch_lightning.callbacks import RichProgressBar

from qat.train.callbacks.epoch_line import EpochLine


def progress(float_accuracy: float | None = None) -> Callback:
    """Rich progress bar when standard output is a terminal, else `EpochLine`."""
    return RichProgressBar() if sys.stdout.isatty() else EpochLine(float_accuracy)
