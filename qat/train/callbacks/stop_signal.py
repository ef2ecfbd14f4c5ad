"""Ctrl-C between two steps, not inside one."""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

from pytorch_lightning import Callback

log = logging.getLogger(__name__)


class StopSignal(Callback):
    """The first Ctrl-C only sets `requested`; `RunCheckpoint` then saves after the running step and ends the run.

    Stopped in the middle of a step the optimizer may have moved half of the parameters, and going on from there would not be
    the same run. A second Ctrl-C stops at once; the checkpoint is then the one of the last epoch.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = None
        self._process = os.getpid()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._handle)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._restore()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a worker of the data loader, which inherits the handler
            return
        self.requested = True
        log.warning("stopping after this step; Ctrl-C again to stop at once")
        self._restore()

    def _restore(self) -> None:
        if self._previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
