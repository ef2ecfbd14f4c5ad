"""A sweep recipe: `python train.py recipe=compare_fold`, or `resume=SWEEP_DIR` (docs/sweeps.md)."""

import argparse
import json
from pathlib import Path

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from qat.cli.compose import Composer, options_of
from qat.cli.recipes import sweep_of
from qat.cli.sweep_comparison import asked_of
from qat.cli.sweep_folder import SWEEP, held, new_folder, read_sweep, what_is_swept, write_sweep
from qat.cli.sweep_plan import Job, Plan, plan_of
from qat.cli.sweep_resume import NOT_OF_JOBS, resumed_sweep
from qat.cli.sweep_run import SweepRun
from qat.cli.sweep_section import changed, command_of, section_of
from qat.errors import ConfigError, QATError


def is_sweep(words: list[str], composer: Composer) -> bool:
    """Do these words ask for a sweep recipe, or for the rest of a sweep?

    Raises:
        ConfigError: not Hydra's grammar, or words for a sweep without one.
    """
    given = {override.key_or_group: override for override in composer.parse(words)}
    if "resume" in given:
        sweep = not given["resume"].is_sweep_override() and (Path(str(given["resume"].value())) / SWEEP).is_file()
    else:
        names = map(str, options_of(given["recipe"])) if "recipe" in given else []
        sweep = any(sweep_of(name, composer.recipes) is not None for name in names if name in composer.recipes)
    for key in given:
        if not sweep and key.partition(".")[0] == "sweep":
            raise ConfigError(key, "words for a sweep", "a recipe with a section sweep", "Give such a recipe, or use -m (docs/sweeps.md).")
    return sweep


def obey_sweep(words: list[str], arguments: argparse.Namespace, composer: Composer) -> int:
    """Print the jobs' configurations, or run what is left of the jobs; the exit status.

    Raises:
        ConfigError: bad words, or a sweep that cannot be gone on with; nothing was run.
    """
    overrides = composer.parse(arguments.overrides)
    _refuse_other_ways(overrides, arguments.multirun)
    given = {override.key_or_group: override for override in overrides}
    others = [override for override in overrides if override.key_or_group not in NOT_OF_JOBS]
    began: Path | None
    if "resume" in given:
        began, plan, run_root = resumed_sweep(given, others, composer)
    else:
        began, plan, run_root = _asked(given, others, composer)
    if arguments.cfg:
        rest = plan.rest({cell: next(iter(plan.grid)) for cell in plan.cells}) if not plan.section.tune else []
        texts = [f"# {job.label}\n{OmegaConf.to_yaml({**job.config, 'run_root': run_root})}" for job in [*plan.first(), *rest]]
        print("---\n".join(texts), end="")
        return 0
    for cell, reason in plan.impossible:
        print(f"not possible: {cell} ({reason})")
    recorded = what_is_swept(plan.section, run_root)
    if plan.section.baseline is not None and asked_of(recorded).baseline is None:
        print(f"note: {plan.section.baseline} is not among what is compared: the comparison chooses another baseline (sweep.baseline=NAME)")
    _check_networks(plan)
    own = composer.recipes.get(plan.section.recipe)
    notes = [f"recipe {own.name} is your own, {own.path}"] if own and own.own else []
    told = "going on in" if began else "begun in"
    folder = began or new_folder(run_root, plan.section.recipe)
    with held(folder):
        sweep = SweepRun(plan, folder, run_root, command_of(plan.section) if "resume" in given else words, notes)
        write_sweep(folder, plan.section, run_root)
        seeds = f"seed{'s' * (len(plan.seeds) > 1)} {', '.join(map(str, plan.seeds))}"
        print(f"sweep of {len(plan.cells)} combination{'s' * (len(plan.cells) > 1)}, {seeds}, {told} {folder}", flush=True)
        return sweep.run()


def _check_networks(plan: Plan) -> None:
    """Build each network of the sweep once, on its data: what no job could do is said before the first one.

    Raises:
        ConfigError: data that cannot be read, or a network that cannot be prepared.
    """
    from qat.train.job import check_job

    different: dict[str, Job] = {}
    for job in plan.jobs.values():
        config = job.config
        parts = [config["model"], config["data"], config["target"], config["quant"]["overrides"], config["ptq"]]
        different.setdefault(json.dumps(parts), job)  # unsorted: of two patterns that match the later wins
    for job in different.values():
        try:
            told = check_job(job.config)
        except QATError as error:
            raise ConfigError(f"{job.label}: {error.where}", error.found, error.expected, error.todo) from error
        if told:
            print(f"note: {told}")


def _asked(given: dict[str, Override], others: list[Override], composer: Composer) -> tuple[Path | None, Plan, str]:
    """The folder of the sweep if the same command has begun it, the plan of a recipe with what the command line changes in it, and its
    run_root."""
    recipe = str(given["recipe"].value())
    composer.check_recipe(recipe)
    written = section_of(recipe, sweep_of(recipe, composer.recipes), composer, f"{composer.recipes[recipe].path}: ")
    plan = plan_of(changed(written, others, composer), composer)
    root = given["run_root"].value() if "run_root" in given else next(iter(plan.jobs.values())).config["run_root"]
    return _same(plan, str(root)), plan, str(root)


def _refuse_other_ways(overrides: list[Override], multirun: bool) -> None:
    for override in overrides:
        if override.key_or_group.startswith(("hydra/launcher", "hydra.launcher")):
            expected = "no launcher: the jobs of a sweep recipe run one after the other and share a float network"
            todo = "Leave it out, or use -m with recipes of one run."
            raise ConfigError("hydra.launcher", str(override.input_line), expected, todo)
    if multirun:
        raise ConfigError("-m", "a sweep recipe", "recipes of one run: a sweep recipe runs all its jobs by itself", "Leave out -m.")
    for override in overrides:
        if override.key_or_group in NOT_OF_JOBS and override.is_sweep_override():
            raise ConfigError(override.key_or_group, "several values", "one", "Give one.")


def _same(plan: Plan, run_root: str) -> Path | None:
    """The folder of the last sweep that this command started; None: begin one."""
    wanted = what_is_swept(plan.section, run_root)
    places = Path(run_root) / plan.section.recipe
    if "new" in plan.section.options or not places.is_dir():
        return None
    for folder in sorted((path for path in places.iterdir() if (path / SWEEP).is_file()), reverse=True):
        try:
            if {**read_sweep(folder), "baseline": wanted["baseline"]} == wanted:
                return folder
        except ConfigError:  # a file that someone changed: another sweep
            continue
    return None
