"""Any folder of class folders."""

from qat.train.data.folders import read_folders
from qat.train.data.image_data import ImageData
from qat.train.data.pictures import Splits


class ImageFolder(ImageData):
    """`root` has train/, val/ and, if wanted, test/. Mean and std default to those of ImageNet, the size to 224.

    Without test/ the val folder is the test split, and `val_fraction` of train, chosen by the seed, is validation.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def read(self) -> Splits:
        return read_folders(self.options["root"], self.options["image_size"] or 224, self.options["val_fraction"], self.split_seed)
