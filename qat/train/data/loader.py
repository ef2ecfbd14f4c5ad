"""A training loader that can go on in the middle of an epoch.

Lightning keeps `state_dict()` of such a loader in every checkpoint. On resume it calls, in this order, `load_state_dict` (only
when the checkpoint was written before the end of its epoch), `iter`, `sampler.set_epoch`, `next`. The epoch is therefore known
only when the first batch is asked for, and everything here waits until then.
"""

from typing import Any

from torch.utils.data import DataLoader, Dataset

from qat.errors import ConfigError


class ResumableLoader(DataLoader):
    """DataLoader over a `TrainSampler`, whose state is the number of batches handed out in the running epoch.

    Batches that workers have fetched ahead do not count. `len` is that of a whole epoch, also after a resume. One consumer at
    a time: a second iteration over the same loader would take over the count.
    """

    def __init__(self, dataset: Dataset, **options: Any):
        super().__init__(dataset, **options)
        self._epoch = 0
        self._handed_out = 0
        self._resume: dict[str, int] | None = None

    def state_dict(self) -> dict[str, int]:
        """Plain integers: epoch, batches handed out in it, and what the order of the samples depends on."""
        return self._resume or {"epoch": self._epoch, "batches": self._handed_out, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration skips the batches handed out before, if it is one of the same epoch.

        Raises (when the first batch is asked for):
            ConfigError: the order of the samples would differ from the one in the checkpoint.
        """
        self._resume = dict(state)

    def _order(self) -> dict[str, int]:
        sampler: Any = self.sampler
        return {"seed": sampler.seed, "samples": sampler.samples, "ranks": sampler.num_replicas, "batch_size": self.batch_size or 1}

    def _batches_done(self, epoch: int) -> int:
        state, self._resume = self._resume, None
        if state is None or state["epoch"] != epoch:
            return 0
        for key, value in self._order().items():
            if state["batches"] and state[key] != value:
                todo = f"Resume with the settings of the run, or from a checkpoint of an epoch's end ({key} may then change)."
                raise ConfigError("resume", f"{key} {value} in the middle of epoch {epoch}", f"{key} {state[key]} as saved", todo)
        return state["batches"]

    def __iter__(self) -> Any:
        sampler: Any = self.sampler
        self._epoch, done = sampler.epoch, self._batches_done(sampler.epoch)
        self._handed_out = done
        sampler.start = done * (self.batch_size or 1)
        for batch in super().__iter__():
            self._handed_out += 1
            yield batch
