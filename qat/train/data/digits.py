"""The 1797 digits of 8x8 pixels that ship with scikit-learn: the source that needs no download."""

import torch

from qat.train.data.image_data import ImageData
from qat.train.data.pictures import ArrayPictures, Splits, resized
from qat.train.data.split import stratified


class Digits(ImageData):
    """450 test pictures, the same for every seed; `val_fraction` of the others, chosen by the seed, is validation."""

    mean = (0.3,)
    std = (0.35,)

    def read(self) -> Splits:
        from sklearn.datasets import load_digits  # slow to import, and only this source needs it

        pixels, labels = load_digits(return_X_y=True)
        images = (torch.from_numpy(pixels).view(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)
        size = self.options["image_size"]
        whole = ArrayPictures(resized(images, size), torch.from_numpy(labels))
        rest, test = stratified(whole.labels, 0.25, seed=0)
        train, val = stratified(whole.labels[rest], self.options["val_fraction"], self.split_seed)
        shape = (1, size or 8, size or 8)
        return Splits([str(d) for d in range(10)], shape, whole.subset(rest[train]), whole.subset(rest[val]), whole.subset(test))
