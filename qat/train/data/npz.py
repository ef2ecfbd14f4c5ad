"""One .npz file with the key names of MedMNIST: {train,val,test}_{images,labels}."""

import zlib
from pathlib import Path
from zipfile import BadZipFile, is_zipfile

import numpy as np
import torch

from qat.errors import ConfigError
from qat.train.data.image_data import ImageData
from qat.train.data.pictures import ArrayPictures, Splits, resized
from qat.train.data.split import class_count

KEYS = [f"{split}_{what}" for split in ("train", "val", "test") for what in ("images", "labels")]


def _arrays(root: str | None) -> dict[str, np.ndarray]:
    expected = "an .npz file with the arrays " + ", ".join(KEYS)
    if root is None or not Path(root).expanduser().is_file():
        raise ConfigError("data.root", f"no file at {root!r}", expected, "Set data.root=FILE.npz.")
    path, todo = Path(root).expanduser(), "Write it with numpy.savez, without object arrays."
    if not is_zipfile(path):  # numpy.load would take it for an array or a pickle
        raise ConfigError(root, "a file that is no .npz archive", expected, todo)
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [key for key in KEYS if key not in file.files]
            if missing:
                found = f"the arrays {', '.join(file.files) or 'none'}; missing {', '.join(missing)}"
                raise ConfigError(root, found, expected, "Save the splits under these names.")
            return {key: file[key] for key in KEYS}
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        raise ConfigError(root, f"a file numpy cannot read ({error})", expected, todo) from error


def _pictures(root: str, split: str, images: np.ndarray, labels: np.ndarray, size: int | None) -> ArrayPictures:
    """Images (N, H, W), (N, H, W, 1) or (N, H, W, 3) uint8 and labels (N,) or (N, 1) integers."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or images.dtype != np.uint8 or not len(images):
        found = f"{images.dtype} of shape {images.shape}"
        raise ConfigError(f"{root}: {split}_images", found, "uint8 (N, H, W), (N, H, W, 1) or (N, H, W, 3), N > 0", "Convert the pictures.")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
        found = f"{labels.dtype} of shape {labels.shape}"
        raise ConfigError(f"{root}: {split}_labels", found, f"integers ({len(images)},) or ({len(images)}, 1)", "One class a picture.")
    pixels = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2)))
    return ArrayPictures(resized(pixels, size), torch.from_numpy(labels.astype(np.int64)))


class Npz(ImageData):
    """`root` is the path of the file; grey or colour.

    Raises:
        ConfigError: no such file, arrays missing or of another kind, labels out of range, splits of other shapes.
    """

    def read(self) -> Splits:
        root = self.options["root"]
        arrays = _arrays(root)
        parts = {
            split: _pictures(root, split, arrays[f"{split}_images"], arrays[f"{split}_labels"], self.options["image_size"])
            for split in ("train", "val", "test")
        }
        shapes = {split: (part.images.shape[1], part.images.shape[2], part.images.shape[3]) for split, part in parts.items()}
        if len(set(shapes.values())) > 1:
            raise ConfigError(root, f"pictures of shapes {shapes}", "one shape (C, H, W)", "Convert them, or set data.image_size.")
        classes = class_count(root, parts["train"].labels, val=parts["val"].labels, test=parts["test"].labels)
        return Splits([str(c) for c in range(classes)], shapes["train"], **parts)
