"""Random numbers go on after a resume where they stopped."""

import random
from typing import Any

import numpy as np
import torch
from pytorch_lightning import Callback


def rng_state() -> dict[str, Any]:
    """Generators of Python, numpy and torch (CPU and every CUDA device) as plain containers and tensors."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo of `rng_state`. CUDA generators are set when as many devices are there as were saved."""
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


class RngState(Callback):
    """Save the random generators in every checkpoint, restore them on resume.

    Starting the iteration over a loader draws one number. At the start of an epoch the uninterrupted run draws it too, so the
    state is set before; in the middle of an epoch it does not, so the state is set again in front of the first step.
    In a run of several processes the state is that of rank 0; other ranks start again from the seed, so that where a network draws random
    numbers of its own (dropout) the resumed run is another one.
    """

    def __init__(self) -> None:
        self._inside_epoch = False
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"rng": rng_state(), "inside_epoch": self._inside_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["rng"]
        self._inside_epoch = state_dict["inside_epoch"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._saved is not None and trainer.is_global_zero:
            set_rng_state(self._saved)
        if not self._inside_epoch:
            self._saved = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._saved is not None and trainer.is_global_zero:
            set_rng_state(self._saved)
        self._saved = None
        self._inside_epoch = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._inside_epoch = False
