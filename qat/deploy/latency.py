"""How long a network takes: calls measured in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return cls(median, low, high)


def interleaved(calls: Mapping[str, Callable[[], Any]], rounds: int, warmup: int = 2, pause: float = 0.03) -> dict[str, list[float]]:
    """Seconds of each call by name, one measurement a round, every round in another order.

    Args:
        warmup: rounds that are not counted.
        pause: seconds in front of each call, in which the threads of the call before stop waiting for more work.
    """
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for i in range(warmup + rounds):
            turned = names[i % len(names) :] + names[: i % len(names)]
            for name in turned:
                time.sleep(pause)
                start = time.perf_counter()
                calls[name]()
                if i >= warmup:
                    seconds[name].append(time.perf_counter() - start)
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    return seconds


def ratio(seconds: list[float], baseline: list[float]) -> Spread:
    """How many times as long as the baseline, round by round."""
    return Spread.of([own / base for own, base in zip(seconds, baseline, strict=True)])
