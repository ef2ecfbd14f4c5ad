"""What every source offers: loaders for the three splits and batches for calibration."""

import copy
from typing import Any, ClassVar

import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from qat.choose import check_name
from qat.errors import ConfigError
from qat.train.data.augment import AUGMENTS
from qat.train.data.loader import ResumableLoader
from qat.train.data.pictures import Batches, Pictures, Splits
from qat.train.data.sample_seed import permutation
from qat.train.data.sampler import EvalSampler, TrainSampler

_DEFAULTS: dict[str, Any] = {
    "root": None,
    "image_size": None,
    "batch_size": 64,
    "eval_batch_size": 256,
    "workers": 0,
    "augment": "none",
    "mean": None,
    "std": None,
    "val_fraction": 0.15,
    "split_seed": None,
}


def _as_is(batch: Any) -> Any:
    """Collate function of batches that the dataset has already put together."""
    return batch


class ImageData(LightningDataModule):
    """Base of the sources, each of which implements `read`. Everything is read and checked on construction.

    Args:
        data: the `data` part of a recipe; absent keys have defaults.
        seed: chooses the order of the samples and the augmentation; and, unless `data` has a split_seed, the validation split where the
            source has none.

    Raises:
        ConfigError: missing or malformed data, unknown augmentation, mean or std of another number of channels.
    """

    mean: ClassVar[tuple[float, ...]] = (0.5,)  # of pictures in [0, 1]; one value, or one a channel
    std: ClassVar[tuple[float, ...]] = (0.5,)

    def __init__(self, data: dict[str, Any], seed: int):
        super().__init__()
        self.options = _DEFAULTS | data
        self.seed = seed
        self.split_seed = seed if self.options["split_seed"] is None else self.options["split_seed"]
        augment = AUGMENTS[check_name("data.augment", self.options["augment"], AUGMENTS)]
        self.splits = self.read()
        self.class_names = self.splits.class_names
        self.num_classes = len(self.class_names)
        self.input_shape = self.splits.shape
        self._augment = augment(*self.input_shape[1:]) if augment else None
        self._mean = self._channels("mean", self.mean)
        self._std = self._channels("std", self.std)
        if min(self._std) <= 0:
            raise ConfigError("data.std", str(self._std), "positive numbers", "Give the standard deviation of pixels in [0, 1].")

    def seeded(self, seed: int) -> "ImageData":
        """The same splits, of which nothing is read again, in another order and with other augmentation."""
        other = copy.copy(self)
        other.seed = seed
        return other

    @property
    def normalisation(self) -> dict[str, list[float]]:
        """{"mean", "std"} of pictures in [0, 1], one value or one a channel."""
        return {"mean": self._mean, "std": self._std}

    def read(self) -> Splits:
        """Load the data; called once."""
        raise NotImplementedError

    def _channels(self, key: str, default: tuple[float, ...]) -> list[float]:
        given = self.options[key]
        values = [given] if isinstance(given, int | float) else list(default if given is None else given)
        channels = self.input_shape[0]
        if len(values) not in (1, channels):
            raise ConfigError(f"data.{key}", f"{len(values)} values", f"1 or {channels}, one a channel", "Change it or leave it null.")
        return [float(v) for v in values]

    def _batches(self, pictures: Pictures, augmented: bool) -> Batches:
        return Batches(pictures, self._augment if augmented else None, self._mean, self._std, self.seed)

    def _loading(self) -> dict[str, Any]:
        workers = self.options["workers"]
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        # a generator of its own: each iteration draws a seed for the workers, which must not move the random numbers of training
        own = torch.Generator().manual_seed(self.seed)
        return {"num_workers": workers, "persistent_workers": workers > 0, "pin_memory": on_cuda, "collate_fn": _as_is, "generator": own}

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled and augmented; a last partial batch is left out unless it would be the only one.

        Build it inside `fit` (Lightning does): the shards are those of the process group that runs at that moment.
        """
        sampler = TrainSampler(len(self.splits.train.labels), self.seed)
        size = self.options["batch_size"]
        dataset = self._batches(self.splits.train, augmented=True)
        return ResumableLoader(dataset, batch_size=size, sampler=sampler, drop_last=len(sampler) >= size, **self._loading())

    def _eval_loader(self, pictures: Pictures) -> DataLoader:
        sampler = EvalSampler(len(pictures.labels))
        size = sampler.even_batch_size(self.options["eval_batch_size"])
        return DataLoader(self._batches(pictures, augmented=False), batch_size=size, sampler=sampler, **self._loading())

    def val_dataloader(self) -> DataLoader:
        return self._eval_loader(self.splits.val)

    def test_dataloader(self) -> DataLoader:
        return self._eval_loader(self.splits.test)

    def first_of(self, split: str, count: int) -> list[tuple[Tensor, Tensor]]:
        """`count` pictures of "val" or "test" in batches of eval_batch_size, ((B, C, H, W), labels (B,)): the same at every call, chosen
        from all over the split.

        Raises:
            ConfigError: more than the split has.
        """
        pictures: Pictures = getattr(self.splits, split)
        if count > len(pictures.labels):
            found, held = f"{count} pictures of the {split} split", f"at most {len(pictures.labels)}, all it has"
            raise ConfigError("pictures", found, held, "Ask for fewer.")
        size, dataset = self.options["eval_batch_size"], self._batches(pictures, augmented=False)
        order = permutation(len(pictures.labels), self.seed, epoch=0)[:count].tolist()
        return [dataset.__getitems__([(0, i) for i in order[at : at + size]]) for at in range(0, count, size)]

    def calibration_batches(self, n: int) -> list[Tensor]:
        """Up to `n` batches (batch_size, C, H, W) of training pictures without augmentation, the same on every rank and call."""
        size = self.options["batch_size"]
        order = permutation(len(self.splits.train.labels), self.seed, epoch=0)[: n * size].tolist()
        dataset = self._batches(self.splits.train, augmented=False)
        return [dataset.__getitems__([(0, i) for i in order[at : at + size]])[0] for at in range(0, len(order), size)]
