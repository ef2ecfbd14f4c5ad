"""How AdaRound solves the problem of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qat.errors import QATError


@dataclass(frozen=True)
class Settings:
    """How a problem is solved; see `adaround`.

    Raises:
        QATError: a value out of its range.
    """

    iterations: int = 1000
    batch_size: int = 32
    lr: float = 1e-2
    regularisation: float = 10.0
    warm_up: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)

    def __post_init__(self) -> None:
        for key in ("lr", "regularisation", "warm_up", "beta"):
            value, expected = getattr(self, key), "two numbers" if key == "beta" else "a number"
            parts = value if key == "beta" and isinstance(value, tuple) else (value,)
            if len(parts) != (2 if key == "beta" else 1) or not all(isinstance(part, (int, float)) for part in parts):
                raise QATError(f"adaround.{key}", repr(value), expected, f"Leave {key} out.")
        wrong = [
            ("iterations", not _is_count(self.iterations), "a whole number above 0", 1000),
            ("batch_size", not _is_count(self.batch_size), "a whole number above 0", 32),
            ("lr", not 0 < self.lr < math.inf, "a number above 0", 1e-2),
            ("regularisation", not 0 <= self.regularisation < math.inf, "a number of at least 0", 10.0),
            ("warm_up", not 0 <= self.warm_up < 1, "a share of the iterations below 1", 0.2),
            ("beta", not math.inf > self.beta[0] >= self.beta[1] > 1, "a first and a last exponent, both above 1 and falling", (20, 2)),
        ]
        for key, is_wrong, expected, example in wrong:
            if is_wrong:
                raise QATError(f"adaround.{key}", repr(getattr(self, key)), expected, f"Write {key}={example}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
