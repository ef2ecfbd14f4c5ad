"""Adapt networks made for 224x224 pictures to small ones, by taking less resolution away in the stem."""

from typing import Any

import torchvision.models as tv
from timm.models.efficientnet import EfficientNet
from timm.models.mobilenetv3 import MobileNetV3
from timm.models.resnet import ResNet
from torch import nn

from qat.errors import ConfigError


def _stride_one(conv: nn.Module) -> None:
    conv.stride = (1, 1)  # type: ignore[assignment]


def _timm_mobile(network: Any) -> None:
    _stride_one(network.conv_stem)


def _torchvision_mobile(network: Any) -> None:
    _stride_one(network.features[0][0])


def _resnet(network: Any) -> None:
    """He et al. 2016, section 4.2: 3x3 stem with stride 1, no max-pool. A deep stem keeps its convolutions at stride 1."""
    stem = network.conv1
    if isinstance(stem, nn.Sequential):
        _stride_one(stem[0])
    else:
        network.conv1 = nn.Conv2d(stem.in_channels, stem.out_channels, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()


# timm's EfficientNet class also is its MobileNet-v1 and -v2
KNOWN: dict[type[nn.Module], Any] = {
    EfficientNet: _timm_mobile,
    MobileNetV3: _timm_mobile,
    ResNet: _resnet,
    tv.MobileNetV2: _torchvision_mobile,
    tv.MobileNetV3: _torchvision_mobile,
    tv.EfficientNet: _torchvision_mobile,
    tv.ResNet: _resnet,
}


def adapt(network: nn.Module, name: str) -> None:
    """Change the stem in place.

    Raises:
        ConfigError: a network of another family.
    """
    for family, change in KNOWN.items():
        if isinstance(network, family):
            return change(network)
    known = ", ".join(sorted({f"{family.__module__.split('.')[0]} {family.__name__}" for family in KNOWN}))
    todo = "Set model.small_input=false, and give the model a stem for small pictures itself (source python)."
    raise ConfigError("model.small_input=true", f"{name}, a {type(network).__name__}", f"one of the families {known}", todo)
