"""Where a model's name is looked up: this project's narrow families, timm, torchvision, the user's own code."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import timm
import torchvision
from timm.models import efficientnet, resnet
from torch import nn

from qat.errors import ConfigError
from qat.train.choose import check_name

Options = dict[str, Any]


def _mobilenetv1(num_classes: int, in_channels: int, options: Options) -> nn.Module:
    width = options.pop("width", 1.0)
    return efficientnet._gen_mobilenet_v1("mobilenetv1_100", width, num_classes=num_classes, in_chans=in_channels, **options)


def _mobilenetv2(num_classes: int, in_channels: int, options: Options) -> nn.Module:
    width = options.pop("width", 1.0)
    return efficientnet._gen_mobilenet_v2("mobilenetv2_100", width, num_classes=num_classes, in_chans=in_channels, **options)


def _resnet18(num_classes: int, in_channels: int, options: Options) -> nn.Module:
    width = options.pop("width", 1.0)
    channels = tuple(int(c * width) for c in (64, 128, 256, 512))
    return resnet.ResNet(
        resnet.BasicBlock, (2, 2, 2, 2), num_classes, in_channels, stem_width=channels[0], channels=channels, **options
    )


FAMILIES: dict[str, Callable[[int, int, Options], nn.Module]] = {
    "mobilenetv1": _mobilenetv1,
    "mobilenetv2": _mobilenetv2,
    "resnet18": _resnet18,
}


def _qat(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    family = FAMILIES[check_name("model.name", name, FAMILIES)]
    return _built(name, options, lambda: family(num_classes, in_channels, dict(options)))


def _timm(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    check_name("model.name", name, timm.list_models())
    return _built(name, options, lambda: timm.create_model(name, pretrained=False, num_classes=num_classes, in_chans=in_channels, **options))


def _torchvision(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    check_name("model.name", name, torchvision.models.list_models(module=torchvision.models))
    if in_channels != 3:
        raise ConfigError("model.source", f"torchvision with {in_channels} input channels", "3", "Take the model from timm.")
    return _built(name, options, lambda: torchvision.models.get_model(name, weights=None, num_classes=num_classes, **options))


def _python(name: str, num_classes: int, in_channels: int, options: Options) -> nn.Module:
    module, _, function = name.partition(":")
    try:
        build = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        todo = "Name a function that can be imported from the working directory or an installed package."
        raise ConfigError("model.name", f"'{name}' ({error})", "package.module:function", todo) from error
    return _built(name, options, lambda: build(num_classes=num_classes, in_chans=in_channels, **options))


def _built(name: str, options: Options, build: Callable[[], nn.Module]) -> nn.Module:
    try:
        return build()
    except TypeError as error:
        raise ConfigError("model.options", f"{options} ({error})", f"options that {name} takes", "Correct or drop the option.") from error


SOURCES: dict[str, Callable[[str, int, int, Options], nn.Module]] = {
    "qat": _qat,
    "timm": _timm,
    "torchvision": _torchvision,
    "python": _python,
}
