"""`resume=RUN_DIR`: the configuration of an interrupted run, and nothing else, so that it goes on as if it had not stopped."""

from pathlib import Path
from typing import Any

from qat.cli.compose import Composer, leaves
from qat.errors import ConfigError
from qat.report.result import read_result
from qat.train.recorded import recorded_config


def recorded(folder: Path, trusted: str | None = None) -> dict[str, Any]:
    """The configuration in a run folder.

    Args:
        trusted: `model.name` on the command line.

    Raises:
        ConfigError: not a run folder, a run that is finished, or a configuration that cannot be used (see `recorded_config`).
    """
    if not (folder / "config.yaml").is_file():
        raise ConfigError("resume", f"no config.yaml in {str(folder)!r}", "the folder of a run", "Give runs/RECIPE/TIMESTAMP.")
    if (folder / "result.json").is_file() and read_result(folder)["status"] == "ok":
        raise ConfigError("resume", f"the finished run {str(folder)!r}", "an interrupted or failed one", "Start a run of its own.")
    return recorded_config(folder, trusted)


def value_at(config: dict[str, Any], key: str) -> Any:
    """The value at a dotted key; None where there is none."""
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
    named = given.get("model.name")
    config = recorded(folder, None if named is None else str(named.value()))
    rest = [str(override.input_line) for key, override in given.items() if key != "recipe"]
    asked = str(given["recipe"].value()) if "recipe" in given else config["recipe"]
    changed = ["recipe"] if asked != config["recipe"] else []
    if rest and not changed:
        plain, wanted = composer.compose([f"recipe={asked}"]), composer.compose([f"recipe={asked}", *rest])
        keys = {key for key in leaves(wanted) if value_at(plain, key) != value_at(wanted, key)} | {
            key for key in given if key not in composer.options
        }
        changed = sorted(key for key in keys if value_at(wanted, key) != value_at(config, key))
    if changed:
        todo = f"Drop them (`resume={folder}` is enough), or start a run of its own."
        raise ConfigError("resume", f"other values of {', '.join(changed)}", f"those of {folder / 'config.yaml'}", todo)
    # a run folder decides what is computed, not where on this machine files are written
    inside = folder.resolve().is_relative_to(Path(config["run_root"]).resolve())
    return {**config, "resume": str(folder), "run_root": config["run_root"] if inside else str(folder.parent)}
