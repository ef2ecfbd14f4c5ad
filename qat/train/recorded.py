"""The configuration in a run folder, which may be someone else's: it is read as data, and names no code but the user's own."""

import importlib
import inspect
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from qat.errors import ConfigError
from qat.train.config import complete


def recorded_config(folder: Path, trusted: str | Collection[str] | None = None) -> dict[str, Any]:
    """The configuration of a run, complete.

    Args:
        trusted: `model.name` of a function of the user's that may be called though it is not in the working directory, or several.

    Raises:
        ConfigError: no readable configuration, an interpolation in it, or a network of a function that is not the user's.
    """
    path = folder / "config.yaml"
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        found = f"{str(folder)!r} without a readable config.yaml ({type(error).__name__})"
        raise ConfigError(str(path), found, "the configuration of a run", "Give runs/RECIPE/TIMESTAMP.") from error
    if not isinstance(plain, dict):
        raise ConfigError(str(path), f"a {type(plain).__name__}", "the configuration of a run", "Give runs/RECIPE/TIMESTAMP.")
    for key, value in _texts(plain):
        if "${" in value:
            todo = "A run records resolved values; look at who wrote this one."
            raise ConfigError(f"{path}: {key}", f"the interpolation {value!r}", "a plain value", todo)
    config = complete(plain)
    names = [trusted] if isinstance(trusted, str) else trusted or ()
    if config["model"]["source"] == "python" and config["model"]["name"] not in names:
        require_own(config["model"]["name"], folder)
    return config


def _texts(node: Any, path: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) of every key and value of nested containers that is text."""
    if isinstance(node, str):
        return [(path or "configuration", node)]
    if isinstance(node, dict):
        return [found for key, value in node.items() for part in (key, value) for found in _texts(part, f"{path}.{key}".lstrip("."))]
    return [found for value in node for found in _texts(value, path)] if isinstance(node, list) else []


def require_own(name: str, folder: Path) -> None:
    """Raise ConfigError unless `name` is a function defined in a file below the working directory that did not come with the run folder.

    What lies beside a run folder came with it: of the working directory the whole first folder on the way to it is left out.
    """
    module_name, _, attribute = name.partition(":")
    here, parts = Path.cwd().resolve(), module_name.split(".")
    files = [here.joinpath(*parts).with_suffix(".py"), here.joinpath(*parts, "__init__.py")] if all(parts) else []
    came_with = folder.resolve()
    if came_with.is_relative_to(here):
        came_with = here.joinpath(*came_with.relative_to(here).parts[:1])
    if any(file.is_file() and not file.resolve().is_relative_to(came_with) for file in files):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            defined = inspect.getsourcefile(getattr(importlib.import_module(module_name), attribute))
        except Exception:  # a module can fail in any way when it is imported
            defined = None
        if defined is not None and Path(defined).resolve() in [file.resolve() for file in files]:
            return
    found = f"{name!r}, which is not defined in the working directory"
    todo = f"If it is yours, run from its folder, or say so: --trust-model {name} (resume: model.name={name})."
    raise ConfigError(f"{folder}: model.name", found, "a function of your own, as a run folder can name any", todo)
