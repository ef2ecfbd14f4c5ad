"""`resume=RUN_DIR`: the configuration of an interrupted run, and nothing else, so that it goes on as if it had not stopped."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from qat.cli.compose import Composer, leaves
from qat.errors import ConfigError
from qat.report.result import read_result
from qat.train.config import complete


def recorded(folder: Path) -> dict[str, Any]:
    """The configuration in a run folder.

    Raises:
        ConfigError: not a run folder, or a run that is finished.
    """
    try:
        config = OmegaConf.load(folder / "config.yaml")
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        found = f"{str(folder)!r} without a readable config.yaml"
        raise ConfigError("resume", found, "the folder of a run", "Give runs/RECIPE/TIMESTAMP.") from error
    if (folder / "result.json").is_file() and read_result(folder)["status"] == "ok":
        raise ConfigError("resume", f"the finished run {str(folder)!r}", "an interrupted or failed one", "Start a run of its own.")
    return complete(config)


def _value(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def resumed(words: list[str], composer: Composer) -> dict[str, Any]:
    """The configuration to go on with; `resume` in it is the run folder.

    The words of the first start may be given again. Other settings are refused: half a run with each would be neither.

    Raises:
        ConfigError: not a run to go on with, or other settings than its own.
    """
    overrides = composer.parse(words)
    composer.check(overrides)
    given = {override.key_or_group: override for override in overrides}
    folder = Path(str(given.pop("resume").value()))
    config = recorded(folder)
    rest = [str(override.input_line) for key, override in given.items() if key != "recipe"]
    asked = str(given["recipe"].value()) if "recipe" in given else config["recipe"]
    changed = ["recipe"] if asked != config["recipe"] else []
    if rest and not changed:
        plain, wanted = composer.compose([f"recipe={asked}"]), composer.compose([f"recipe={asked}", *rest])
        keys = {key for key in leaves(wanted) if _value(plain, key) != _value(wanted, key)} | {
            key for key in given if key not in composer.options
        }
        changed = sorted(key for key in keys if _value(wanted, key) != _value(config, key))
    if changed:
        todo = f"Drop them (`resume={folder}` is enough), or start a run of its own."
        raise ConfigError("resume", f"other values of {', '.join(changed)}", f"those of {folder / 'config.yaml'}", todo)
    return {**config, "resume": str(folder)}
