"""ImageNet (ILSVRC 2012), or some of its classes, in folders named by WordNet ids."""

import re

from qat.errors import ConfigError
from qat.train.data.folders import LAYOUT, read_folders
from qat.train.data.image_data import ImageData
from qat.train.data.pictures import Splits


class ImageNet(ImageData):
    """Like `ImageFolder`, for class folders n01440764, n01443537, ...: their sorted order is the order of published weights.

    Raises:
        ConfigError: class folders that are no WordNet ids.
    """

    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)

    def read(self) -> Splits:
        splits = read_folders(self.options["root"], self.options["image_size"] or 224, self.options["val_fraction"], self.split_seed)
        others = [name for name in splits.class_names if not re.fullmatch(r"n\d{8}", name)]
        if others:
            todo = f"Use data=imagefolder for other names. {LAYOUT}"
            raise ConfigError("data.root", f"class folders {others[:5]}", "WordNet ids such as n01440764", todo)
        return splits
