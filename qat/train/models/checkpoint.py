"""Load a local checkpoint of floats into a network, or say key by key why it does not fit."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qat.errors import ConfigError

_WRAPPERS = ("module.", "network.", "_orig_mod.")  # DistributedDataParallel, this project's LightningModule, torch.compile
_SHOWN = 5


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file of anything can make its reader fail in any way
        found = f"a file that cannot be read as tensors ({str(error).splitlines()[0]})"
        todo = "Save `model.state_dict()` alone; pickled objects are not loaded."
        raise ConfigError(str(path), found, ".safetensors, or .pth of plain tensors", todo) from error


def _tensors(path: Path, own: Collection[str]) -> dict[str, Tensor]:
    """The tensors of a checkpoint: at its top or under `state_dict` or `model`.

    Prefixes of wrappers go, unless the names are those of the network as they stand.
    """
    state = _read(path)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            str(path), "no state_dict of tensors", "tensors at the top or under 'state_dict' or 'model'", "Save a state_dict."
        )
    while not any(key in own for key in state) and any(all(key.startswith(prefix) for key in state) for prefix in _WRAPPERS):
        state = {key.partition(".")[2]: value for key, value in state.items()}
    return state


def _first(keys: list[str]) -> str:
    return ", ".join(keys[:_SHOWN]) + (f", ... ({len(keys)} in all)" if len(keys) > _SHOWN else "")


def _mismatch(own: dict[str, Tensor], state: dict[str, Tensor], num_classes: int) -> tuple[str, str]:
    """(what does not fit, next step); an empty first part when all fits."""
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in own]
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    # the head is what has one row a class and differs in nothing else
    head = [k for k in wrong if len(own[k]) == num_classes and own[k].shape[1:] == state[k].shape[1:]]
    if wrong and head == wrong and not missing and not unexpected:
        layer = head[0].rpartition(".")[0]
        found = f"a head '{layer}' of {len(state[head[0]])} classes for data of {num_classes}"
        return found, "Take weights trained on these classes: the head is not replaced silently."
    shapes = [f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}" for key in wrong]
    lists = {"missing": missing, "unexpected": unexpected, "wrong shape": shapes}
    return "; ".join(f"{len(keys)} {what}: {_first(keys)}" for what, keys in lists.items() if keys), (
        "Check model.name and model.options (width, small_input, ...) against the network that was saved."
    )


def classes_in(network: nn.Module, path: str, num_classes: int) -> int:
    """Classes of the head in a checkpoint: rows of what has `num_classes` in `network` and otherwise fits; `num_classes` where nothing has.

    Raises:
        ConfigError: not a file of tensors.
    """
    own, file = network.state_dict(), Path(path).expanduser()
    state = _tensors(file, own) if file.is_file() else {}
    heads = {
        len(state[key])
        for key, value in own.items()
        if key in state and value.dim() and len(value) == num_classes != len(state[key]) and state[key].shape[1:] == value.shape[1:]
    }
    return heads.pop() if len(heads) == 1 else num_classes


def load_checkpoint(network: nn.Module, path: str, num_classes: int) -> None:
    """Load .safetensors or .pth into the network; every tensor must fit. BN's batch counters may be absent.

    Raises:
        ConfigError: no such file, not a file of tensors, or other tensors than the network's.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError("model.checkpoint", f"no file at '{path}'", "a local .safetensors or .pth file", "Check the path.")
    own = network.state_dict()
    state = _tensors(file, own)
    found, todo = _mismatch(own, state, num_classes)
    if found:
        raise ConfigError(f"model.checkpoint={path}", found, f"the {len(own)} tensors of the network", todo)
    network.load_state_dict(own | state)
