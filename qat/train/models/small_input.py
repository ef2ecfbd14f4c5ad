"""Networks for ImageNet made fit for pictures of a few dozen pixels, as the field does: no early downsampling."""

from typing import Any

from torch import nn

from qat.errors import ConfigError


def adapt_to_small_input(network: Any, name: str) -> None:
    """MobileNets and EfficientNets: stem stride 1. ResNets: 3x3 stem of stride 1, no max-pool. In place.

    Raises:
        ConfigError: a network of neither family.
    """
    stem = getattr(network, "conv_stem", None)
    if isinstance(stem, nn.Conv2d):
        stem.stride = (1, 1)
    elif isinstance(getattr(network, "conv1", None), nn.Conv2d) and hasattr(network, "maxpool"):
        old = network.conv1
        network.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, 1, 1, bias=old.bias is not None)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
        network.maxpool = nn.Identity()
    elif isinstance(first := next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None), nn.Conv2d) and "mobilenet" in name:
        first.stride = (1, 1)
    else:
        expected = "a MobileNet or EfficientNet (conv_stem) or a ResNet (conv1, maxpool)"
        raise ConfigError("model.small_input", f"true for '{name}'", expected, "Set model.small_input=false, or adapt the network in your own code.")
