"""CIFAR-10 through torchvision, downloaded under `root` when it is not there."""

from urllib.error import URLError

import torch
from torchvision.datasets import CIFAR10

from qat.errors import ConfigError
from qat.train.data.image_data import ImageData
from qat.train.data.pictures import ArrayPictures, Splits, resized
from qat.train.data.split import stratified


class Cifar10(ImageData):
    """The 10000 official test pictures; `val_fraction` of the 50000 others, chosen by the seed, is validation.

    Raises:
        ConfigError: no root given, or the download failed.
    """

    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def _official(self, train: bool) -> tuple[ArrayPictures, list[str]]:
        root = self.options["root"]
        if root is None:
            raise ConfigError("data.root", "null", "a folder to keep CIFAR-10 in", "Set data.root=FOLDER.")
        try:
            source = CIFAR10(root, train=train, download=True)
        except (URLError, OSError, RuntimeError) as error:
            expected = "FOLDER/cifar-10-batches-py/ or a way to download it"
            todo = "Unpack cifar-10-python.tar.gz there, or use data=digits."
            raise ConfigError("data.root", f"no CIFAR-10 under {root!r} ({error})", expected, todo) from error
        images = torch.from_numpy(source.data).permute(0, 3, 1, 2)
        return ArrayPictures(resized(images, self.options["image_size"]), torch.tensor(source.targets)), list(source.classes)

    def read(self) -> Splits:
        (whole, names), (test, _) = self._official(train=True), self._official(train=False)
        train, val = stratified(whole.labels, self.options["val_fraction"], self.split_seed)
        size = self.options["image_size"] or 32
        return Splits(names, (3, size, size), whole.subset(train), whole.subset(val), test)
