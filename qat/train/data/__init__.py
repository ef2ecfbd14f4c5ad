"""Data: a source by name -> loaders that are reproducible, resumable and sharded over ranks."""

from typing import Any

from qat.choose import check_name
from qat.train.data.cifar10 import Cifar10
from qat.train.data.digits import Digits
from qat.train.data.image_data import ImageData
from qat.train.data.imagefolder import ImageFolder
from qat.train.data.imagenet import ImageNet
from qat.train.data.mnist5k import Mnist5k
from qat.train.data.npz import Npz

SOURCES: dict[str, type[ImageData]] = {
    "digits": Digits,
    "mnist5k": Mnist5k,
    "npz": Npz,
    "cifar10": Cifar10,
    "imagefolder": ImageFolder,
    "imagenet": ImageNet,
}


def build_data(data: dict[str, Any], seed: int) -> ImageData:
    """The data of a recipe, read and checked.

    Raises:
        ConfigError: unknown source, or data that cannot be used.
    """
    return SOURCES[check_name("data.name", data.get("name"), SOURCES)](data, seed)


__all__ = ["SOURCES", "ImageData", "build_data"]
