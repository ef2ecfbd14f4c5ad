"""Pictures in class folders: ROOT/{train,val,test}/<class>/<picture>, decoded when they are asked for."""

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms.v2 import functional as transform

from qat.errors import ConfigError
from qat.train.data.pictures import Augment, Splits
from qat.train.data.split import stratified

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
LAYOUT = """Lay the pictures out as
  ROOT/
    train/<class>/*.jpg
    val/<class>/*.jpg
    test/<class>/*.jpg    (optional; without it val/ is the test split and a share of train/ is for validation)"""


def evaluated(picture: Tensor, size: int) -> Tensor:
    """(3, h, w) -> (3, size, size): shorter side to 256/224 of the size, then the centre; as it is when it has that size."""
    if tuple(picture.shape[-2:]) == (size, size):
        return picture
    picture = transform.resize(picture, [round(size * 256 / 224)], antialias=True)
    return transform.center_crop(picture, [size, size])


class FilePictures:
    """A split kept as paths; pictures are read as RGB, or in another mode of Pillow's ("L": one grey channel)."""

    def __init__(self, paths: list[bytes], labels: list[int], size: int, mode: str = "RGB"):
        # one array: reference counts of a million strings would copy them into every worker
        self.paths = np.array(paths)
        self.labels = torch.tensor(labels)
        self.size, self.mode = size, mode

    def get(self, index: int, augment: Augment | None) -> Tensor:
        path = os.fsdecode(self.paths[index])
        try:
            with Image.open(path) as file:
                picture = transform.pil_to_tensor(eight_bits(file).convert(self.mode))
        except (OSError, SyntaxError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ConfigError(
                path, f"a picture that cannot be read ({error})", "a readable picture", "Remove or replace the file."
            ) from error
        if augment is None or not getattr(augment, "any_size", False):
            picture = evaluated(picture, self.size)
        return augment(picture) if augment else picture

    def subset(self, indices: Tensor) -> "FilePictures":
        part = FilePictures([], [], self.size, self.mode)
        part.paths, part.labels = self.paths[indices.numpy()], self.labels[indices]
        return part


def eight_bits(picture: Image.Image) -> Image.Image:
    """Grey pictures of 16 bits with their levels divided by 256, which Pillow would cut off at 255; others as they are."""
    if not picture.mode.startswith("I"):
        return picture
    return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))


def picture_names(folder: Path) -> list[str]:
    """Sorted names of the pictures that lie in a folder; hidden files are none."""
    entries = (entry.name for entry in os.scandir(folder))
    return sorted(name for name in entries if name.lower().endswith(SUFFIXES) and not name.startswith("."))


def class_folders(folder: Path) -> list[str]:
    """Sorted names of the class folders.

    Raises:
        ConfigError: no such folder, not readable, or no class folders in it.
    """
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ConfigError("data.root", f"no readable folder {folder} ({error.strerror})", "a folder of class folders", LAYOUT) from error
    if not names:
        raise ConfigError("data.root", f"no class folders in {folder}", "a folder for each class", LAYOUT)
    return names


def read_split(folder: Path, classes: list[str], size: int, mode: str = "RGB") -> FilePictures:
    """The pictures of one split, by class and then by name.

    Raises:
        ConfigError: other classes than expected, a class folder without pictures or not readable.
    """
    found = class_folders(folder)
    if found != classes:
        missing, extra = sorted(set(classes) - set(found)), sorted(set(found) - set(classes))
        text = (
            f"{len(found)} classes in {folder}" + (f", without {missing[:5]}" if missing else "") + (f", with {extra[:5]}" if extra else "")
        )
        raise ConfigError("data.root", text, f"the {len(classes)} classes of train/", "Make the class folders of all splits the same.")
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        try:
            files = picture_names(folder / name)
        except OSError as error:
            raise ConfigError(
                str(folder / name), f"a folder that cannot be read ({error.strerror})", "pictures", "Check its rights."
            ) from error
        if not files:
            raise ConfigError(
                str(folder / name), "no pictures", f"files ending in {' '.join(SUFFIXES)}", "Add pictures or remove the folder."
            )
        paths += [os.fsencode(folder / name / file) for file in files]
        labels += [label] * len(files)
    return FilePictures(paths, labels, size, mode)


def read_folders(root: str | None, size: int, val_fraction: float, seed: int) -> Splits:
    """The three splits under `root`.

    Raises:
        ConfigError: a folder missing, empty or not readable; splits of other classes.
    """
    if root is None:
        raise ConfigError("data.root", "null", "the folder of the pictures", LAYOUT)
    base = Path(root).expanduser()
    classes = class_folders(base / "train")
    train, val = (read_split(base / split, classes, size) for split in ("train", "val"))
    if (base / "test").is_dir():
        return Splits(classes, (3, size, size), train, val, read_split(base / "test", classes, size))
    kept, held = stratified(train.labels, val_fraction, seed)
    return Splits(classes, (3, size, size), train.subset(kept), train.subset(held), val)
