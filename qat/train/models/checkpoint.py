"""Local weights into a network: safetensors, or a torch file loaded without executing code."""

import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qat.errors import ConfigError

_PREFIXES = ("module.", "network.", "model.")
_SHOWN = 3


def load_checkpoint(network: nn.Module, path: str | Path) -> None:
    """Fill `network`; every key must be there and fit.

    Raises:
        ConfigError: missing or unreadable file; missing, unexpected or wrong-shape keys (counts, and the first few).
    """
    state, wanted = read_state(Path(path)), network.state_dict()
    missing = [k for k in wanted if k not in state and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in wanted]
    shapes = [f"{k} {tuple(state[k].shape)} for {tuple(v.shape)}" for k, v in wanted.items() if k in state and state[k].shape != v.shape]
    faults = [_few(title, keys) for title, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes)) if keys]
    if faults:
        todo = "Check model.name, model.options (width, ...) and the number of classes of the data."
        raise ConfigError(f"model.checkpoint={path}", "; ".join(faults), "the keys and shapes of the model", todo)
    network.load_state_dict(state, strict=False)


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors by name; wrappers ('state_dict', 'model') and prefixes of trainers removed."""
    if not path.is_file():
        raise ConfigError(f"model.checkpoint={path}", "no such file", "a local .safetensors or .pth file", "Check the path.")
    try:
        content: Any = load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        todo = "Save the state_dict alone: torch.save(model.state_dict(), path)."
        raise ConfigError(f"model.checkpoint={path}", f"a file that cannot be read ({error})", "tensors by name", todo) from error
    for key in ("state_dict", "model"):
        content = content[key] if isinstance(content.get(key), dict) else content
    for prefix in _PREFIXES:
        if content and all(k.startswith(prefix) for k in content):
            content = {k.removeprefix(prefix): v for k, v in content.items()}
    return content


def _few(title: str, keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} {title} ({', '.join(keys[:_SHOWN])}{more})"
