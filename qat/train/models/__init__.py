"""The float network of a recipe: built by name, adapted to small pictures, filled from a local checkpoint."""

from typing import Any

from torch import nn

from qat.train.choose import check_name
from qat.train.models.checkpoint import load_checkpoint
from qat.train.models.small_input import adapt_to_small_input
from qat.train.models.sources import SOURCES


def build_model(model: dict[str, Any], num_classes: int, in_channels: int) -> nn.Module:
    """Args:
        model: `source`, `name`, `options`, `small_input`, `checkpoint` of a recipe.

    Raises:
        ConfigError: unknown source or name, options the model does not take, a checkpoint that does not fit.
    """
    source = SOURCES[check_name("model.source", model["source"], SOURCES)]
    network = source(model["name"], num_classes, in_channels, dict(model.get("options") or {}))
    if model.get("small_input"):
        adapt_to_small_input(network, model["name"])
    if model.get("checkpoint"):
        load_checkpoint(network, model["checkpoint"])
    return network


__all__ = ["SOURCES", "build_model"]
