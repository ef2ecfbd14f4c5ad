"""What happens to integer weights and to ranges in a run, at some moments spread over it."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from pytorch_lightning import Callback
from torch import Tensor

from qat.train.callbacks.range_ends import ENDS, range_ends
from qat.train.callbacks.weight_codes import WeightCodes, changed, quantized_layers
from qat.train.schedule import steps_in

JITTERS = ("jitter", "jitter_statistics")


def moments_of(total: int, count: int) -> list[int]:
    """At most `count` optimizer steps from 1 to total - 1, evenly spread: steps that have a batch before them."""
    last = total - 1
    if count < 1 or last < 1:
        return []
    if count == 1:
        return [last]
    return sorted({1 + round(i * (last - 1) / (count - 1)) for i in range(count)})


class Record(Callback):
    """At each moment the ranges of all quantizers, and for the last batch of the step before and the first of this one the jitter.

    Jitter is the share of a layer's integer weight codes in the training forward that differ between the two batches, by the optimizer's
    step and by the statistics; `jitter_statistics` the share that differs by the statistics alone, of the later batch's float weights.
    It is None where a layer was not quantized; moments at which none was are left out.

    The run computes the same bits with and without. What is measured stays on the device until the end of the epoch; steps that are
    not observed cost nothing. In a run of several processes rank 0 records.

    Put it in front of callbacks that use a batch's statistics or make forwards of their own.

    Args:
        moments: how many, at most; 0: none.

    Attributes:
        history: {"jitter", "jitter_statistics": {"steps", "layers": {name: [share or None]}},
            "ranges": {"steps", "tensors": {quantizer: {"scale_low", "scale_high", "low", "high": [value or None]}}}}, plain containers.
            A step is the number of optimizer steps done when its batch came.
    """

    def __init__(self, moments: int):
        self.moments = moments
        self.history: dict[str, Any] = {key: {"steps": [], "layers": {}} for key in JITTERS} | {"ranges": {"steps": [], "tensors": {}}}
        self._steps: frozenset[int] = frozenset()
        self._latest, self._at = 0, 0
        self._watched: WeightCodes | None = None
        self._codes: Mapping[str, Tensor] = {}  # of the batch before, when the next one is observed
        self._sigmas: Mapping[str, Tensor | None] = {}
        self._unread: list[tuple[str, int, dict[str, Tensor | None]]] = []

    def state_dict(self) -> dict[str, Any]:
        self._read()
        codes = {name: value.cpu() for name, value in self._codes.items()}
        sigmas = {name: None if value is None else value.cpu() for name, value in self._sigmas.items()}
        return {"history": self.history, "latest": self._latest, "codes": codes, "sigmas": sigmas}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history, self._latest = state_dict["history"], state_dict["latest"]
        self._codes, self._sigmas = state_dict["codes"], state_dict["sigmas"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._steps = frozenset(moments_of(steps_in(trainer), self.moments) if trainer.is_global_zero else ())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step = self._at = trainer.global_step
        if self._due(step):
            self._unread.append(("ranges", step, dict(range_ends(pl_module.network))))
        if self._due(step) or step + 1 in self._steps:
            self._watched = WeightCodes(quantized_layers(pl_module.network), self._sigmas if self._due(step) else {})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        watched = self._watched
        if watched is None:
            return
        self._close()
        if self._due(self._at):
            if self._codes:
                self._compare(watched)
            self._latest = self._at
        follows = self._at + 1 in self._steps
        self._codes, self._sigmas = (watched.codes, watched.used()) if follows else ({}, {})

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._read()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close()

    def _due(self, step: int) -> bool:
        """Whether this batch is the first of a moment's step."""
        return step in self._steps and step > self._latest

    def _close(self) -> None:
        if self._watched is not None:
            self._watched.close()
            self._watched = None

    def _compare(self, watched: WeightCodes) -> None:
        shares = {name: changed(watched.codes.get(name), self._codes.get(name)) for name in watched.layers}
        by_statistics = {}
        for name, share in shares.items():
            moved = changed(watched.codes.get(name), watched.as_before.get(name))
            by_statistics[name] = torch.zeros_like(share) if moved is None and share is not None else moved
        for key, values in zip(JITTERS, (shares, by_statistics)):
            self._unread.append((key, self._at, values))

    def _read(self) -> None:
        """Fetch what was measured, in one read from the device."""
        values = [value.reshape(-1) for _, _, row in self._unread for value in row.values() if value is not None]
        numbers = iter(torch.cat(values).tolist() if values else ())
        for key, step, row in self._unread:
            part = self.history[key]
            part["steps"].append(step)
            for name, value in row.items():
                found = [None] if value is None else [_plain(next(numbers)) for _ in range(value.numel())]
                if key == "ranges":
                    ends = part["tensors"].setdefault(name, {end: [] for end in ENDS})
                    for end, number in zip(ENDS, found):
                        _place(ends[end], part["steps"], number)
                else:
                    _place(part["layers"].setdefault(name, []), part["steps"], found[0])
        self._unread.clear()


def _plain(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _place(series: list[float | None], steps: list[int], number: float | None) -> None:
    """Append, after None for the steps at which there was nothing."""
    series.extend([None] * (len(steps) - 1 - len(series)))
    series.append(number)
