"""The float network of `scripts/quantize.py`: a name, a function, a run folder or a file -> a network, and the pictures it wants."""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import CaptureError, ConfigError, QATError
from qat.fold import FoldedConvBN
from qat.train.finished_run import open_run
from qat.train.models import build_model
from qat.train.models.checkpoint import classes_in

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
_FILES = (".pt", ".pth", ".pt2", ".ckpt", ".safetensors", ".onnx")
# what the parts of a recipe are called on this command line
_WORDS = {"model.name": "MODEL", "model.source": "MODEL", "model.options": "MODEL", "model.checkpoint": "--checkpoint"}


@dataclass(frozen=True)
class FloatModel:
    """A float network in eval mode.

    Attributes:
        shape: (C, H, W) of a picture.
        mean, std: of pictures in [0, 1], one value or one a channel.
        data: the source its pictures came from, for the file's notes.
        classes: columns of its logits; set by `checked`.
    """

    network: nn.Module
    shape: tuple[int, int, int]
    mean: list[float]
    std: list[float]
    data: str = "imagefolder"
    classes: int = 0


def float_model(word: str, checkpoint: str | None, trusted_file: bool, trusted_name: str | None) -> FloatModel:
    """The network that MODEL names, with the picture size and normalisation it was made for.

    Args:
        word: a name of timm's, torchvision:NAME, package.module:function, a run folder, or a file.
        checkpoint: file of weights for a named network.
        trusted_file: whether a file of a whole network may be unpickled, which runs code in it.
        trusted_name: as in `qat.train.recorded.recorded_config`.

    Raises:
        ConfigError: nothing of that name, weights that are missing or do not fit, a file of something else.
    """
    path = Path(word).expanduser()
    if path.is_dir():
        _without(checkpoint, "a run folder, which has its weights")
        return _of_run(path, trusted_name)
    if path.is_file() and not word.endswith(".py"):
        _without(checkpoint, "a file, which has its weights")
        return FloatModel(_saved(path, trusted_file), (3, 224, 224), *IMAGENET)
    if path.suffix in _FILES:
        raise ConfigError("MODEL", f"no file {word!r}", "a file that exists", "Correct the path.")
    prefix, colon, rest = word.partition(":")
    source, name = (prefix, rest) if colon and prefix in ("timm", "torchvision", "qat") else ("python" if colon else "timm", word)
    with _said_here():
        return _named(source, name, checkpoint)


def checked(model: FloatModel, size: int | None, mean: list[float] | None, std: list[float] | None) -> FloatModel:
    """`model` with other pictures, where given, once it was seen to take them.

    Raises:
        ConfigError: normalisation of another number of channels; a network that takes no such pictures or returns no logits.
    """
    channels, height, width = model.shape
    if channels not in (1, 3):
        raise ConfigError("MODEL", f"a network for pictures of {channels} channels", "1 or 3, as pictures have", "Give another network.")
    for option, given in (("--mean", mean), ("--std", std)):
        if given is not None and (len(given) not in (1, channels) or (option == "--std" and min(given) <= 0)):
            expected = f"1 or {channels} numbers" + (", positive" if option == "--std" else "")
            raise ConfigError(option, " ".join(map(str, given)), expected, "Those of pictures in [0, 1].")
    model = replace(model, shape=(channels, size or height, size or width))
    model = replace(model, mean=model.mean if mean is None else mean, std=model.std if std is None else std)
    try:
        with torch.no_grad():
            logits = model.network.eval()(torch.zeros(2, *model.shape))
    except Exception as error:  # the network is the user's and can fail in any way
        found = f"{type(error).__name__} ({' '.join(str(error).split())[:200]}) on pictures of {model.shape}"
        raise ConfigError("MODEL", found, "a network that takes them", "Give its --image-size.") from error
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != 2:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError("MODEL", f"an output of {shape} for two pictures", "(2, classes)", "Give a classifier that returns logits.")
    return replace(model, classes=logits.shape[1])


def _named(source: str, name: str, checkpoint: str | None) -> FloatModel:
    build = {"source": source, "name": name}
    if source != "python" and checkpoint is None:
        build_model(build, 1000, 3)  # an unknown name is said first
        saved = {
            "timm": f"import timm, torch; torch.save(timm.create_model('{name}', pretrained=True).state_dict(), 'weights.pth')",
            "torchvision": f"import torchvision, torch; torch.save(torchvision.models.get_model('{name}', weights='DEFAULT').state_dict(), "
            "'weights.pth')",
        }.get(source)
        todo = f'With a connection: python -c "{saved}"' if saved else "Train it first."
        raise ConfigError("--checkpoint", "no weights, and nothing is downloaded", f"a local .pth or .safetensors file for {name}", todo)
    classes = 1000
    if checkpoint is not None:
        classes = classes_in(build_model(build, classes, 3), checkpoint, classes)
    network = build_model({**build, "checkpoint": checkpoint}, classes, 3)
    if source != "timm":
        return FloatModel(network, (3, 224, 224), *IMAGENET)
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg

    known = get_pretrained_cfg(name)
    wants: dict[str, Any] = resolve_data_config(pretrained_cfg={} if known is None else known.to_dict(), model=None if known else network)
    return FloatModel(network, wants["input_size"], list(wants["mean"]), list(wants["std"]))


def _of_run(folder: Path, trusted: str | None) -> FloatModel:
    run = open_run(folder, trusted)
    network, told = run.float_network()
    if any(isinstance(module, FoldedConvBN) for module in network.modules()):
        todo = f"Start from the folder whose {run.config['run_root']}/float_cache/ holds it, or run it again."
        raise ConfigError(str(folder), f"only {told}", "the float network the run started from", todo)
    data = run.data()
    return FloatModel(network, data.input_shape, data.normalisation["mean"], data.normalisation["std"], run.config["data"]["name"])


def _saved(path: Path, trusted: bool) -> nn.Module:
    expected = "a whole network saved by torch.save(model, FILE)"
    names = zipfile.ZipFile(path).namelist() if zipfile.is_zipfile(path) else []
    other = next((what for marks, what in _ARCHIVES.items() if any(name.endswith(marks) for name in names)), None)
    if other is not None:
        todo = "Give package.module:function, or the network itself saved whole."
        raise ConfigError(str(path), f"{other}, whose layers are single operations", expected, todo)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of anything can make its reader fail in any way
        if not trusted:
            found = f"a file of more than tensors ({type(error).__name__}), which runs code when it is loaded"
            todo = "Add --trust-file if it is yours; or save model.state_dict() and give it as --checkpoint of a name."
            raise ConfigError(str(path), found, "a file you trust", todo) from error
        content = _unpickled(path, expected)
    if not isinstance(content, nn.Module):
        todo = "Name the architecture as MODEL, and give the file as --checkpoint."
        raise ConfigError(str(path), "weights without their network", expected, todo)
    return content


# the last part of a name in the archive -> what the archive is
_ARCHIVES = {
    ("constants.pkl",): "a TorchScript program",
    ("archive_format", "serialized_exported_program.json", "models/model.json"): "an exported program",
}


def _unpickled(path: Path, expected: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        todo = "Run from the folder that holds the network's code."
        raise ConfigError(str(path), f"{type(error).__name__} ({said})", expected, todo) from error


def _without(checkpoint: str | None, what: str) -> None:
    if checkpoint is not None:
        raise ConfigError("--checkpoint", f"{checkpoint!r} with {what}", "one of the two", "Leave out --checkpoint.")


@contextmanager
def _said_here() -> Iterator[None]:
    """Errors about parts of a recipe in the words of this command line."""
    try:
        yield
    except CaptureError:
        raise
    except QATError as error:
        where, equals, value = error.where.partition("=")
        raise ConfigError(_WORDS.get(where, where) + equals + value, error.found, error.expected, error.todo) from error
