"""A callback that acts once, before the first batch after a given optimizer step, and remembers in the checkpoint that it did."""

from typing import Any

from pytorch_lightning import Callback

from qat.train.schedule import resolve, steps_in


class AtStep(Callback):
    """Base.

    Args:
        at: optimizer step (int) or share of the run (float in (0, 1)); None: never.

    Raises:
        ConfigError: when training starts, for a step beyond the run.
    """

    key = ""  # of `at` in a recipe, for errors

    def __init__(self, at: int | float | None):
        self.at = at
        self.step: int | None = None
        self.done = at is None

    def act(self, network: Any, step: int) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = resolve(self.key, self.at, steps_in(trainer))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.done and self.step is not None and trainer.global_step >= self.step:
            self.act(pl_module.network, trainer.global_step)
            self.done = True
