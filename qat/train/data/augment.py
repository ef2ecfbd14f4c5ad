"""Random changes of a training picture: uint8 (C, h, w) -> uint8 (C, H, W). They draw from torch's CPU generator."""

import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import v2


def random_crop(picture: Tensor, padding: int) -> Tensor:
    """A window of the picture's own size, moved by up to `padding` pixels in each direction over a black border."""
    height, width = picture.shape[-2:]
    y, x = torch.randint(0, 2 * padding + 1, (2,)).tolist()
    return pad(picture, (padding,) * 4)[..., y : y + height, x : x + width]


def random_flip(picture: Tensor) -> Tensor:
    """Left and right exchanged in half of the cases."""
    return picture.flip(-1) if torch.rand(()) < 0.5 else picture


class Shift:
    """For digits: moved by up to 2 pixels, by 1 in pictures under 16 pixels."""

    any_size = False

    def __init__(self, height: int, width: int):
        self.padding = 2 if min(height, width) >= 16 else 1

    def __call__(self, picture: Tensor) -> Tensor:
        return random_crop(picture, self.padding)


class CropFlip:
    """For small colour pictures: moved by up to 4 pixels, and flipped (He et al. 2016, section 4.2)."""

    any_size = False

    def __init__(self, height: int, width: int):
        pass

    def __call__(self, picture: Tensor) -> Tensor:
        return random_flip(random_crop(picture, 4))


class ImageNet:
    """A window of 35 to 100 % of the area, brought to size, and flipped (Szegedy et al. 2015; the milder scale suits small networks)."""

    any_size = True

    def __init__(self, height: int, width: int):
        self.steps = v2.Compose([v2.RandomResizedCrop((height, width), scale=(0.35, 1.0), antialias=True), v2.RandomHorizontalFlip()])

    def __call__(self, picture: Tensor) -> Tensor:
        return self.steps(picture)


# any_size: takes the picture as decoded, without the resize and centre crop of evaluation before it
AUGMENTS = {"none": None, "shift": Shift, "crop_flip": CropFlip, "imagenet": ImageNet}
