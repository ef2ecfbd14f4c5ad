"""When `fold.freeze: auto` freezes: a definition of this project.

Let D be the drift of one training batch: for every layer the larger of mean_c |mu_B - mu| / sigma and mean_c |log(sigma_B / sigma)|
(means over channels), and of these the maximum over layers. D is measured every k-th optimizer step with fake quantization on, and
E is its exponential average, E <- E + (D - E) / 10, starting at the first D. The BN freezes at the first measurement where

1. from 10 % of the run on: E is below the bound (the statistics agree);
2. from half of the run on: E has made no new low by more than 2 % for 10 % of the run (they agree as well as they will; earlier a
   standstill only says that the learning rate is still high);

and at 90 % of the run at the latest, so that there is always a stretch of training with the weights that ship.
"""

from typing import Any

SHARE = 0.1  # of the run: before an agreement counts, without a new low, and left after the latest freeze
GAIN = 0.1  # weight of one measurement in the average
NEW_LOW = 0.98


class AutoFreeze:
    """The decision above as state that grows by one measurement at a time.

    Args:
        total: optimizer steps of the run.
        bound: agreement, in units of sigma.
    """

    def __init__(self, total: int, bound: float):
        self.bound = bound
        self.earliest = max(1, int(SHARE * total))
        self.half = total // 2
        self.latest = max(1, int((1 - SHARE) * total))
        self.patience = max(1, int(SHARE * total))
        self.every = max(1, min(10, total // 100))  # k
        self.average: float | None = None
        self.low: float | None = None
        self.low_step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "low": self.low, "low_step": self.low_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.low, self.low_step = state["average"], state["low"], state["low_step"]

    def measures(self, step: int) -> bool:
        """Whether a measurement is due after this many optimizer steps."""
        return step % self.every == 0

    def update(self, step: int, drift: float) -> bool:
        """Take in a measurement; True: freeze at this step."""
        self.average = drift if self.average is None else self.average + GAIN * (drift - self.average)
        if self.low is None or self.average < NEW_LOW * self.low:
            self.low, self.low_step = self.average, step
        agree = self.average < self.bound and step >= self.earliest
        settled = step - self.low_step >= self.patience and step >= self.half
        return agree or settled
