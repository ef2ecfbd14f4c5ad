"""The main job: `python train.py recipe=NAME`, or `qat-train recipe=NAME` where the package is installed."""

import argparse
import sys
from typing import Any

from omegaconf import OmegaConf

from qat.cli.command import BAD_INPUT, guarded
from qat.cli.compose import Composer
from qat.cli.launch import launch_jobs, prepared_launcher, split
from qat.cli.recipes import Recipe, find_recipes
from qat.cli.resume import resumed
from qat.cli.run import run_jobs
from qat.cli.sweep import is_sweep, obey_sweep
from qat.cli.sweep_plan import one_device
from qat.cli.sweep_section import OPTIONS
from qat.cli.table import USAGE, print_table
from qat.errors import ConfigError
from qat.train.config import validate


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (a job failed), 2 (bad input, nothing was run) or 130 (stopped by the user).

    Args:
        argv: the command line after the program's name.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = argument_parser()
    arguments = parser.parse_intermixed_args(words)
    return guarded(lambda: obey(words, arguments, parser))


def obey(words: list[str], arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print what was asked for, or run the jobs."""
    recipes = find_recipes()
    with Composer(recipes) as composer:
        if arguments.help:
            print_help(parser, composer)
            return 0
        if not arguments.cfg and not any(word.startswith(("recipe=", "resume=")) for word in arguments.overrides):
            if arguments.overrides:
                check_recipe_given(arguments.overrides, recipes)
            print_table(recipes)
            return BAD_INPUT
        if is_sweep(arguments.overrides, composer):
            return obey_sweep(words, arguments, composer)
        arguments.overrides, own = split(arguments.overrides, arguments.multirun)
        configs = plan(arguments, composer)
        if arguments.cfg:
            print("---\n".join(map(OmegaConf.to_yaml, configs)), end="")
            return 0
        check(configs, arguments.multirun)
        notes = own_recipes(configs, recipes)
        if own:
            return launch_jobs(prepared_launcher(composer, own, configs[0]["run_root"]), configs, words, notes)
    return run_jobs(configs, words, notes)


def check_recipe_given(words: list[str], recipes: dict[str, Recipe]) -> None:
    """Raise ConfigError: there are words, but none that says what to run."""
    named = [word for word in words if word in recipes]
    todo = f"Did you mean recipe={named[0]}?" if named else "python train.py alone lists the recipes."
    raise ConfigError("command line", " ".join(words), "recipe=NAME among them", todo)


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(usage=USAGE, description=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="what differs from the recipe, in Hydra's grammar")
    parser.add_argument("-m", "--multirun", action="store_true", help="run every combination: recipe=A,B seed=0,1,2")
    parser.add_argument("-c", "--cfg", choices=["job"], help="print the configuration and stop")
    parser.add_argument("-h", "--help", action="store_true", help="print this and stop")
    return parser


def print_help(parser: argparse.ArgumentParser, composer: Composer) -> None:
    """The options of every group below argparse's own help."""
    print(parser.format_help())
    print("groups (GROUP=OPTION):")
    for group, options in sorted(composer.options.items()):
        print(f"  {group}: {', '.join(options)}")
    print("\nkeys (KEY=VALUE): see --cfg job; resume=RUN_DIR goes on with an interrupted run or sweep")
    print("sweep recipes: KEY=A,B or sweep.over.KEY=[A,B], sweep.tune.KEY=[A,B], sweep.baseline=NAME;")
    print("  " + "; ".join(f"sweep.{name}=true: {what}" for name, what in OPTIONS.items()))


def plan(arguments: argparse.Namespace, composer: Composer) -> list[dict[str, Any]]:
    """The configuration of every job of the command line.

    Raises:
        ConfigError: unknown names or keys, or a run that cannot be resumed.
    """
    words = arguments.overrides
    if any(word.startswith("resume=") for word in words):
        if arguments.multirun:
            raise ConfigError("resume", "a resume with -m", "one run to resume", "Leave out -m.")
        return [resumed(words, composer)]
    return [composer.compose(job) for job in composer.jobs(words, arguments.multirun)]


def check(configs: list[dict[str, Any]], multirun: bool) -> None:
    """
    Raises:
        ConfigError: values that make no sense, or a sweep over several devices.
    """
    for config in configs:
        validate(config)
        if multirun:
            one_device(config, "together with -m")


def own_recipes(configs: list[dict[str, Any]], recipes: dict[str, Recipe]) -> list[str]:
    """A note for every recipe of the user's own among those to run."""
    names = sorted({config["recipe"] for config in configs})
    return [f"recipe {name} is your own, {recipes[name].path}" for name in names if name in recipes and recipes[name].own]
