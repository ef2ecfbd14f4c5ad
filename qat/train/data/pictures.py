"""Labelled pictures, and the dataset that turns them into normalised batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from qat.train.data.sample_seed import sample_rng

Augment = Callable[[Tensor], Tensor]


class Pictures(Protocol):
    """One split: `labels` (N,) int64, and access to each picture as uint8 (C, H, W)."""

    labels: Tensor

    def get(self, index: int, augment: Augment | None) -> Tensor: ...


@dataclass(frozen=True)
class Splits:
    """What a source reads. `shape` is the (C, H, W) of every picture."""

    class_names: list[str]
    shape: tuple[int, int, int]
    train: Pictures
    val: Pictures
    test: Pictures


class ArrayPictures:
    """A split kept in memory: images uint8 (N, C, H, W)."""

    def __init__(self, images: Tensor, labels: Tensor):
        self.images, self.labels = images.contiguous(), labels.long()

    def get(self, index: int, augment: Augment | None) -> Tensor:
        picture = self.images[index]
        return augment(picture) if augment else picture

    def subset(self, indices: Tensor) -> "ArrayPictures":
        return ArrayPictures(self.images[indices], self.labels[indices])


def resized(images: Tensor, size: int | None) -> Tensor:
    """Images uint8 (N, C, H, W) brought to (N, C, size, size), bilinear with antialiasing; as they are when size is None."""
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    done = []
    for chunk in images.split(1024):  # float copies of a whole data set would be four times its size
        floats = interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True)
        done.append(floats.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(done)


class Batches(Dataset):
    """Dataset over (epoch, index) pairs.

    A whole batch is made at once: list of pairs -> (float32 (B, C, H, W) with `(x / 255 - mean) / std`, labels (B,)).
    """

    def __init__(self, pictures: Pictures, augment: Augment | None, mean: Sequence[float], std: Sequence[float], seed: int):
        self.pictures, self.augment, self.seed = pictures, augment, seed
        self.mean = torch.tensor(mean).view(-1, 1, 1)
        self.std = torch.tensor(std).view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.pictures.labels)

    def __getitem__(self, pair: tuple[int, int]) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([pair])
        return images[0], labels[0]

    def __getitems__(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        images = torch.stack([self._picture(epoch, index) for epoch, index in pairs])
        labels = self.pictures.labels[[index for _, index in pairs]]
        return images.float().div_(255).sub_(self.mean).div_(self.std), labels

    def _picture(self, epoch: int, index: int) -> Tensor:
        if self.augment is None:
            return self.pictures.get(index, None)
        with sample_rng(self.seed, epoch, index):
            return self.pictures.get(index, self.augment)
