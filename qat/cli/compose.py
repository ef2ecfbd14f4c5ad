"""From the words on the command line to one configuration for each job, all of it checked before any work.

Composition, override grammar and sweeps are Hydra's (its Compose API). Runs are not: `qat.cli.run` makes the folders and goes on after
a failed job, which Hydra's launcher does not.
"""

import itertools
from collections.abc import Collection
from functools import cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from qat.cli.folders import packaged
from qat.cli.recipes import Recipe, lineage, register, runnable
from qat.errors import ConfigError
from qat.train.config import complete, is_open, schema
from qat.train.problems import Problems


class Composer:
    """Context in which configurations can be composed from `recipes` and the packaged configs/."""

    def __init__(self, recipes: dict[str, Recipe]):
        self.recipes = recipes
        self.configs = packaged("configs")
        self._checked: set[str] = set()

    def __enter__(self) -> "Composer":
        register(self.recipes)
        GlobalHydra.instance().clear()
        self._hydra = initialize_config_dir(str(self.configs), version_base="1.3")
        self._hydra.__enter__()
        self.loader = GlobalHydra.instance().config_loader()
        folders = [folder for folder in self.configs.iterdir() if folder.is_dir()]
        self.options = {folder.name: sorted(path.stem for path in folder.glob("*.yaml")) for folder in folders}
        self.options["recipe"] = sorted(runnable(self.recipes))
        return self

    def __exit__(self, *error: Any) -> None:
        self._hydra.__exit__(*error)

    def parse(self, words: list[str]) -> list[Override]:
        """
        Raises:
            ConfigError: not Hydra's override grammar.
        """
        try:
            return OverridesParser.create(config_loader=self.loader).parse_overrides(words)
        except HydraException as error:
            found = " ".join(str(error).split("See https")[0].split())
            raise ConfigError("command line", found, "KEY=VALUE", "Quote values that have commas, spaces or brackets.") from error

    def check(self, overrides: list[Override]) -> None:
        """
        Raises:
            ConfigError: unknown groups, options or keys, a line each.
        """
        problems = Problems()
        for override in overrides:
            key = override.key_or_group
            if key.partition(".")[0].partition("/")[0] == "hydra":
                problems.add(key, "a setting of Hydra's own", "a key of the job", "Runs are kept under run_root=FOLDER.")
            elif key in self.options:
                for option in map(str, options_of(override)):
                    problems.name(key, option, self.options[key])
            else:
                check_key(key, list(self.options), problems)
        problems.raise_any()

    def check_recipe(self, name: str) -> None:
        """
        Raises:
            ConfigError: unknown groups, options or keys in the recipe or in what it builds on; names the file.
        """
        if name in self._checked:  # a sweep composes the same recipe for every job
            return
        problems = Problems()
        for recipe in lineage(name, self.recipes):
            for group, option in recipe.choices.items():
                where = f"{recipe.path}: defaults: {group}"
                if problems.name(where, group, [known for known in self.options if known != "recipe"], what="an unknown group"):
                    problems.name(where, option, self.options[group])
            for key in leaves({key: value for key, value in recipe.job.items() if key != "defaults"}):
                check_key(key, [], problems, prefix=f"{recipe.path}: ")
        problems.raise_any()
        self._checked.add(name)

    def compose(self, words: list[str]) -> dict[str, Any]:
        """One configuration, plain and complete.

        Raises:
            ConfigError: everything wrong with its keys and types, a line each.
        """
        chosen = [override.value() for override in self.parse(words) if override.key_or_group == "recipe"]
        if chosen:
            self.check_recipe(str(chosen[-1]))
        try:
            config: DictConfig = compose("train", overrides=[opened(override, self.options) for override in self.parse(words)])
        except (HydraException, OmegaConfBaseException) as error:
            found = " ".join(str(error).split())
            raise ConfigError("command line", found, "overrides Hydra can apply", "Correct it.") from error
        config["recipe"] = str(chosen[-1]) if chosen else None
        return complete(config)

    def jobs(self, words: list[str], sweep: bool) -> list[list[str]]:
        """The overrides of each job: one list, or with `sweep` one for every combination of values.

        Raises:
            ConfigError: bad words, or several values without `sweep`.
        """
        overrides = self.parse(words)
        self.check(overrides)
        if not sweep:
            for override in overrides:
                if override.is_sweep_override():
                    todo = "Add -m to run them all" + ("." if override.key_or_group in self.options else ", or write [A,B] for a list.")
                    raise ConfigError(override.key_or_group, "several values", "one", todo)
            return [words]
        choices = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override()
            else [str(override.input_line)]
            for override in overrides
        ]
        return [list(job) for job in itertools.product(*choices)]


_known = cache(schema)  # to look keys up in, never to be changed


def options_of(override: Override) -> list[Any]:
    """The values of an override of a group."""
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def check_key(key: str, groups: list[str], problems: Problems, prefix: str = "") -> None:
    """Does the schema have the dotted `key`? Adds the closest key, or group, when it does not."""
    node: Any = _known()
    for depth, part in enumerate(parts := key.split(".")):
        if is_open(node):
            return
        known = [str(name) for name in node] if isinstance(node, DictConfig) else []
        if part not in known:
            if not known:
                problems.add(prefix + key, "a key below a value", f"no more than {'.'.join(parts[:depth])}", "Shorten the key.")
            else:
                problems.name(prefix + key, part, {*known, *(groups if depth == 0 else [])}, what="an unknown key")
            return
        node = node._get_node(part)


def leaves(content: Any, path: str = "") -> list[str]:
    """Dotted keys of the values of a nested mapping."""
    if not isinstance(content, dict) or not content:
        return [path] if path else []
    return [leaf for key, value in content.items() for leaf in leaves(value, f"{path}.{key}".lstrip("."))]


def opened(override: Override, groups: Collection[str]) -> str:
    """The override's text; of a value, with `++` in front: the options chosen may leave out a key that the schema knows."""
    text = str(override.input_line)
    return text if text[0] in "+~" or override.key_or_group in groups else f"++{text}"
