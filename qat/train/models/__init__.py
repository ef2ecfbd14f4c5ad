"""Models: a name from a recipe -> a float network, with its weights."""

from typing import Any

from torch import nn

from qat.choose import check_name
from qat.errors import ConfigError
from qat.train.models.checkpoint import load_checkpoint
from qat.train.models.small_input import adapt
from qat.train.models.sources import SOURCES


def build_model(model: dict[str, Any], num_classes: int, in_channels: int) -> nn.Module:
    """The float network of a recipe.

    Args:
        model: `source` and `name`; if wanted `options` (keyword arguments of the network), `small_input`, `checkpoint`.
        num_classes: rows of the classifier.
        in_channels: channels of a picture.

    Raises:
        ConfigError: unknown source, name or option, a network that cannot be adapted, a checkpoint that does not fit.
    """
    source, name, options = model.get("source", "qat"), model["name"], model.get("options") or {}
    build = SOURCES[check_name("model.source", source, SOURCES)]
    try:
        network = build(name, num_classes, in_channels, dict(options))
    except (TypeError, KeyError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, ConfigError) or (source == "python" and not isinstance(error, TypeError)):
            raise
        found = f"{options or 'no options'} ({next(iter(str(error).splitlines()), type(error).__name__)})"
        raise ConfigError("model.options", found, f"options that {name} takes", "Remove or correct the option.") from error
    if model.get("small_input"):
        adapt(network, name)
    if model.get("checkpoint"):
        load_checkpoint(network, model["checkpoint"], num_classes)
    return network


__all__ = ["SOURCES", "build_model"]
