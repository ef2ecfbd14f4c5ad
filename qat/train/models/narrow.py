"""The networks of the recipes at any width, through timm's own generators."""

from collections.abc import Callable
from typing import Any

from timm.layers import make_divisible
from timm.models.efficientnet import _gen_mobilenet_v1, _gen_mobilenet_v2
from timm.models.resnet import BasicBlock, ResNet
from torch import nn

from qat.errors import ConfigError


def mobilenetv1(num_classes: int, in_chans: int, width: float = 1.0, **options: Any) -> nn.Module:
    """MobileNet-v1 (Howard et al. 2017); `width` multiplies all channels. Options are timm's: pad_type, bn_eps, act_layer, ..."""
    return _gen_mobilenet_v1("mobilenetv1_100", channel_multiplier=width, num_classes=num_classes, in_chans=in_chans, **options)


def mobilenetv2(num_classes: int, in_chans: int, width: float = 1.0, **options: Any) -> nn.Module:
    """MobileNet-v2 (Sandler et al. 2018); `width` multiplies all channels but the 1280 of the head, which only grow."""
    return _gen_mobilenet_v2("mobilenetv2_100", channel_multiplier=width, num_classes=num_classes, in_chans=in_chans, **options)


def resnet18(num_classes: int, in_chans: int, width: float = 1.0, **options: Any) -> nn.Module:
    """ResNet-18 (He et al. 2016); `width` multiplies the 64, 128, 256, 512 channels, rounded to multiples of 8.

    timm fixes the stem at 64 channels. At another width the stem and the block that reads it are built again, so that the first
    block keeps its identity skip.
    """
    channels = tuple(make_divisible(base * width, 8) for base in (64, 128, 256, 512))
    block: Any = BasicBlock
    network: Any = ResNet(block, (2, 2, 2, 2), num_classes=num_classes, in_chans=in_chans, channels=channels, **options)
    if (first := channels[0]) != 64:
        if options.get("stem_type") or options.get("replace_stem_pool"):
            raise ConfigError(
                "model.options", f"another stem at width {width:g}", "the plain stem", "Leave stem options out, or use width 1."
            )
        norm, act = type(network.bn1), type(network.act1)
        network.conv1 = nn.Conv2d(in_chans, first, 7, stride=2, padding=3, bias=False)
        network.bn1 = norm(first)
        network.layer1[0] = BasicBlock(first, first, act_layer=act, norm_layer=norm)
        network.feature_info[0]["num_chs"] = first
        network.init_weights(options.get("zero_init_last", True))
    return network


NETWORKS: dict[str, Callable[..., nn.Module]] = {"mobilenetv1": mobilenetv1, "mobilenetv2": mobilenetv2, "resnet18": resnet18}
