"""Where a model comes from: own networks, timm, torchvision, or a function of the user's."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import timm
import torchvision
from torch import nn

from qat.choose import check_name
from qat.errors import ConfigError
from qat.train.models.narrow import NETWORKS

Options = dict[str, Any]


def _own(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    return NETWORKS[check_name("model.name", name, NETWORKS)](num_classes=num_classes, in_chans=in_channels, **options)


def _timm(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    known = timm.list_models()
    architecture, _, _ = str(name).partition(".")  # "resnet18.a1_in1k" names weights too, which are not downloaded
    check_name("model.name", architecture, known)
    for key in options:
        if key == "checkpoint_path" or key.startswith("pretrained"):
            todo = "Give a file of weights as model.checkpoint; nothing is downloaded."
            raise ConfigError(f"model.options.{key}", "weights by way of timm", "options of the architecture", todo)
    return timm.create_model(architecture, pretrained=False, num_classes=num_classes, in_chans=in_channels, **options)


def _torchvision(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    check_name("model.name", name, torchvision.models.list_models(module=torchvision.models))
    if in_channels != 3:
        todo = "Use model.source=timm or qat for pictures of another number."
        raise ConfigError("model.source=torchvision", f"pictures of {in_channels} channels", "3 channels", todo)
    return torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options)


def _python(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    """`name` is "package.module:function"; the working directory is searched too, as it is by `python -m`."""
    module_name, colon, attribute = str(name).partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError("model.name", repr(name), "package.module:function", "For example model.name=mynets.small:build.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        function: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        todo = "Run from the folder that holds the package, or install it."
        raise ConfigError("model.name", f"{name!r}, which cannot be imported ({error})", "package.module:function", todo) from error
    if not callable(function):
        raise ConfigError("model.name", f"{name!r}, a {type(function).__name__}", "a function that returns a torch module", "Name it.")
    accepted = inspect.signature(function).parameters
    any_keyword = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    sizes = {"num_classes": num_classes, "in_chans": in_channels}
    network = function(**{key: value for key, value in sizes.items() if key in accepted or any_keyword}, **options)
    if not isinstance(network, nn.Module):
        raise ConfigError("model.name", f"{name!r} returning {type(network).__name__}", "a torch module", "Return the network.")
    return network


SOURCES: dict[str, Callable[[str, int, int, Options], nn.Module]] = {
    "qat": _own,
    "timm": _timm,
    "torchvision": _torchvision,
    "python": _python,
}
