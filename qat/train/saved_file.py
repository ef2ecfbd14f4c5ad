"""Checkpoints as plain data: tensors and containers are read, pickled objects never, whoever wrote the file."""

from pathlib import Path
from typing import Any

import torch

from qat.errors import ConfigError


def read_checkpoint(path: Path, todo: str = "Run it again.") -> dict[str, Any]:
    """Content of a checkpoint of this project, on the CPU.

    Args:
        todo: what the user can do without the file.

    Raises:
        ConfigError: a file that is damaged, holds other objects than tensors and containers, or is no checkpoint.
    """
    expected = "a checkpoint of tensors and plain containers"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of anything can make its reader fail in any way
        raise ConfigError(str(path), f"a file that cannot be read ({type(error).__name__})", expected, todo) from error
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ConfigError(str(path), "no state_dict", expected, todo)
    return content
