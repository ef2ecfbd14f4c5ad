"""The pictures of `scripts/quantize.py`: a folder -> some to calibrate on and others to measure on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qat.bars import bar
from qat.errors import ConfigError
from qat.train.data.folders import FilePictures, class_folders, picture_names, read_split
from qat.train.data.pictures import Batches
from qat.train.data.sample_seed import permutation

BATCH = 32
LAYOUT = "Give train/ and val/ (or test/) of class folders, class folders, or a folder of pictures."


@dataclass(frozen=True)
class Folder:
    """Two halves of the pictures that are used.

    Attributes:
        class_names: [] of a folder without classes.
        told: where the halves come from.
    """

    calibration: FilePictures
    measured: FilePictures
    class_names: list[str]
    told: str


def read_folder(root: str, size: int, mode: str, count: int) -> Folder:
    """At most `count` pictures of a folder, chosen at random, the same on every call; nothing is decoded yet.

    Args:
        mode: Pillow's: RGB, or L for one grey channel.

    Raises:
        ConfigError: no such folder, or fewer than two pictures in it.
    """
    base, half = Path(root).expanduser(), max(1, count // 2)
    if not base.is_dir():
        raise ConfigError("--data", f"no folder {root!r}", "a folder of pictures", LAYOUT)
    split = next((name for name in ("val", "test") if (base / name).is_dir()), None)
    if (base / "train").is_dir() and split is not None:
        names = class_folders(base / "train")
        train, measured = (read_split(base / part, names, size, mode) for part in ("train", split))
        return Folder(some(train, half), some(measured, half), names, f"train/ and {split}/")
    if (base / "train").is_dir():
        base = base / "train"
    names = [entry.name for entry in os.scandir(base) if entry.is_dir() and not entry.name.startswith(".")]
    files = picture_names(base)
    if names and files:
        raise ConfigError("--data", f"{len(files)} pictures beside {len(names)} folders in {base}", "one or the other", LAYOUT)
    if names:
        names = class_folders(base)
        pictures = read_split(base, names, size, mode)
    else:
        names = []
        pictures = FilePictures([os.fsencode(base / file) for file in files], [0] * len(files), size, mode)
    if len(pictures.labels) < 2:
        found = f"{len(pictures.labels)} picture{'s' * (len(pictures.labels) != 1)} in {base}"
        raise ConfigError("--data", found, "two or more", LAYOUT)
    chosen = some(pictures, 2 * half)
    middle = len(chosen.labels) // 2
    order = torch.arange(len(chosen.labels))
    return Folder(chosen.subset(order[:middle]), chosen.subset(order[middle:]), names, "two halves")


def some(pictures: FilePictures, count: int) -> FilePictures:
    """`count` of them, or all there are, in a random order that is always the same."""
    return pictures.subset(permutation(len(pictures.labels), seed=0, epoch=0)[:count])


def decoded(pictures: FilePictures, mean: list[float], std: list[float], what: str) -> list[Tensor]:
    """All pictures, normalised, in batches (N, C, size, size).

    Raises:
        ConfigError: a picture that cannot be read.
    """
    dataset = Batches(pictures, None, mean, std, seed=0)
    starts = range(0, len(pictures.labels), BATCH)
    return [dataset.__getitems__([(0, i) for i in range(at, min(at + BATCH, len(dataset)))])[0] for at in bar(starts, what)]
