"""When things happen: recipe values (steps, shares of the run) as optimizer steps."""

import logging
import math
from typing import Any

from pytorch_lightning import Trainer

from qat.errors import ConfigError

log = logging.getLogger(__name__)


def resolve(where: str, value: Any, total: int) -> int | None:
    """A step of a run of `total` optimizer steps: an int is itself, a float in (0, 1) a share of the run, None stays None.

    Raises:
        ConfigError: anything else, a negative step, or a step that the run never reaches.
    """
    if value is None:
        return None
    expected = f"null, a step from 0 to {total - 1}, or a share of the run between 0 and 1"
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and not 0 < value < 1):
        raise ConfigError(where, repr(value), expected, "Write 500 for a step or 0.5 for half of the run.")
    step = int(value * total) if isinstance(value, float) else value
    if not 0 <= step < total:
        raise ConfigError(where, f"step {step} of a run of {total} steps", expected, "Lower it, or raise trainer.max_epochs.")
    return step


def optimizer_steps(batches: int, accumulate: int, epochs: int, max_steps: int | None) -> int:
    """Optimizer steps of a run: those of its epochs, of `batches` for one process each, but at most `max_steps` (None or -1: no limit)."""
    steps = math.ceil(batches / accumulate) * epochs
    return steps if max_steps is None or max_steps < 0 else min(steps, max_steps)


def total_steps(batches: int, trainer: dict[str, Any]) -> int:
    """`optimizer_steps` of a run to come.

    Args:
        batches: training batches an epoch offers to one process.
        trainer: the `trainer` part of a recipe; of its devices those of one machine are counted.
    """
    options = trainer.get("options") or {}
    values = trainer | options
    devices = values.get("devices", 1)
    mine = math.ceil(batches / devices) if isinstance(devices, int) and devices > 1 else batches
    limit = limited(mine, values.get("limit_train_batches"))
    return optimizer_steps(limit, values.get("accumulate_grad_batches", 1), values["max_epochs"], values.get("max_steps"))


def limited(batches: int, limit: int | float | None) -> int:
    """Batches of an epoch under Lightning's `limit_train_batches`: a count (int), a share (float) or no limit (None)."""
    if limit is None:
        return batches
    return min(batches, limit) if isinstance(limit, int) else int(batches * limit)


def steps_in(trainer: Trainer) -> int:
    """Optimizer steps of the fit that `trainer` is in.

    `Trainer.estimated_stepping_batches` would build the training loader before the checkpoint's loader state is known, which
    loses the position in the epoch on resume; here the length comes from a second loader that is never iterated.
    """
    source = getattr(trainer, "datamodule", None)
    if source is None:
        return int(trainer.estimated_stepping_batches)
    batches = limited(len(source.train_dataloader()), trainer.limit_train_batches)
    return optimizer_steps(batches, trainer.accumulate_grad_batches, max(trainer.max_epochs or 1, 1), trainer.max_steps)


def validate_schedule(config: dict[str, Any], total: int) -> None:
    """Check every step of a job before any training.

    Raises:
        ConfigError: a step or share outside a run of `total` optimizer steps.
    """
    quant, fold = config["quant"], config["fold"]
    if total < 1:
        raise ConfigError("trainer", f"a run of {total} steps", "at least one step", "Raise trainer.max_epochs or lower data.batch_size.")
    delay = resolve("quant.delay", quant["delay"], total)
    resolve("quant.freeze_ranges", quant["freeze_ranges"], total)
    freeze = None if fold["freeze"] == "auto" else resolve("fold.freeze", fold["freeze"], total)
    if freeze is not None and delay is not None and freeze <= delay > 0:
        log.warning("fold.freeze at step %d is not after quant.delay at step %d: the statistics never see quantized weights", freeze, delay)
