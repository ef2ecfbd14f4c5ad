"""`resume=SWEEP_DIR`: what the sweep was started with, and nothing else but further values of what it sweeps."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override

from qat.cli.compose import Composer, leaves
from qat.cli.resume import value_at
from qat.cli.sweep_folder import SWEEP, read_sweep
from qat.cli.sweep_plan import PLACES, Plan, plan_of
from qat.cli.sweep_section import changed, plain, section_of
from qat.errors import ConfigError
from qat.train.recorded import require_own

NOT_OF_JOBS = ("recipe", *PLACES)  # words that say what to run or where, not what a job is


def resumed_sweep(given: dict[str, Override], others: list[Override], composer: Composer) -> tuple[Path, Plan, str]:
    """The folder and the plan of a sweep to go on with, wider than it was if that is asked for, and its run_root.

    Raises:
        ConfigError: not readable, other settings, or fewer values than it was started with.
    """
    folder = Path(str(given["resume"].value()))
    recorded, todo = read_sweep(folder), f"Drop them (`resume={folder}` is enough), or start a sweep of its own."
    recipe, where = recorded["recipe"], f"those of {folder / SWEEP}"
    asked = str(given["recipe"].value()) if "recipe" in given else recipe
    root = str(given["run_root"].value()) if "run_root" in given else recorded["run_root"]
    other = ["recipe"] * (asked != recipe) + ["run_root"] * (root != recorded["run_root"])
    if other:
        raise ConfigError("resume", f"other values of {', '.join(other)}", where, todo)
    for word in composer.parse(recorded["words"]):
        if word.key_or_group.partition(".")[0] in (*NOT_OF_JOBS, "sweep"):
            found = f"{word.key_or_group} among its words"
            raise ConfigError(str(folder / SWEEP), found, "words of a job", "Look at who wrote this file.")
    composer.check(composer.parse([f"recipe={recipe}"]))
    composer.check_recipe(recipe)
    raw = {key: recorded.get(key) for key in ("over", "tune", "baseline")}
    old = section_of(recipe, raw, composer, f"{folder / SWEEP}: ", words=tuple(recorded["words"]))
    new = changed(old, others, composer)
    if "new" in new.options:
        raise ConfigError("sweep.new", "true with resume", "one of the two", "Leave out one.")
    wide = replace(new, over=_wider("over", old.over, new.over), tune=_wider("tune", old.tune, new.tune), words=old.words)
    plan = plan_of(wide, composer)
    if new.words != old.words:
        pairs = zip(plan.jobs.values(), plan_of(replace(wide, words=new.words), composer).jobs.values())
        keys = {key for one, two in pairs for key in leaves(two.config) if value_at(one.config, key) != value_at(two.config, key)}
        if keys:
            raise ConfigError("resume", f"other values of {', '.join(sorted(keys))}", where, todo)
    named = [plain(given["model.name"].value())] if "model.name" in given else []
    for config in (job.config for job in plan.jobs.values()):
        if config["model"]["source"] == "python" and config["model"]["name"] not in named:
            require_own(config["model"]["name"], folder)
    # a sweep's folder decides what is computed, not where on this machine files are written
    at_home = folder.resolve().parents[1:2] == (Path(root).resolve(),)
    return folder, plan, root if at_home else str(folder.parent)


def _wider(part: str, old: dict[str, list[Any]], new: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The values of `new`, those of `old` first and in their order."""
    if other := sorted(set(old) ^ set(new)):
        found, todo = f"other keys to sweep over ({', '.join(other)})", "Start a sweep of its own."
        raise ConfigError(f"sweep.{part}", found, f"{', '.join(old) or 'none'}, as it was started", todo)
    for key, values in old.items():
        if missing := [value for value in values if value not in new[key]]:
            todo = "Give all values it was started with and the further ones, or start a sweep of its own."
            raise ConfigError(f"sweep.{part}.{key}", f"values without {', '.join(map(str, missing))}", "a wider sweep", todo)
    return {key: [*values, *(value for value in new[key] if value not in values)] for key, values in old.items()}
