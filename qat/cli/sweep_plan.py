"""The jobs of a sweep: every combination of values that can be built, its configuration composed and checked before any job starts."""

import hashlib
import itertools
import json
import re
from dataclasses import dataclass
from typing import Any

from qat.cli.compose import Composer
from qat.cli.recipes import lineage
from qat.cli.sweep_section import Section
from qat.cli.words import word
from qat.errors import ConfigError
from qat.train.config import validate
from qat.train.problems import not_possible

PLACES = ("resume", "run_root")  # where a job is kept, which does not make it another one
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        name: of its folder below jobs/.
        cell: the combination it belongs to, without the seed, in words.
        seed: of its configuration.
        tuned: its values of the tuned keys, in words; "" without any.
        config: complete and checked.
    """

    name: str
    cell: str
    seed: int
    tuned: str
    config: dict[str, Any]

    @property
    def kind(self) -> str:
        """What its duration is estimated by."""
        return str(self.config["fold"]["name"])

    @property
    def label(self) -> str:
        return " ".join(part for part in (self.cell, f"seed {self.seed}", self.tuned) if part)

    @property
    def key(self) -> str:
        return identity_key(self.config)


@dataclass(frozen=True)
class Plan:
    """All jobs of a sweep.

    Attributes:
        cells: the combinations that can be built, in words.
        seeds: the first is the one that tuning is done with.
        grid: the values to choose from, by their words; {"": {}} without any.
        impossible: (combination in words, reason) of those that cannot be built.
        jobs: by (cell, seed, grid entry).
    """

    section: Section
    cells: list[str]
    seeds: list[int]
    grid: dict[str, dict[str, Any]]
    impossible: list[tuple[str, str]]
    jobs: dict[tuple[str, int, str], Job]

    def tried(self, cell: str) -> list[Job]:
        """The jobs that the values of a cell are chosen from."""
        return [self.jobs[cell, self.seeds[0], tuned] for tuned in self.grid]

    def first(self) -> list[Job]:
        """What runs with the first seed."""
        return [job for cell in self.cells for job in self.tried(cell)]

    def rest(self, chosen: dict[str, str]) -> list[Job]:
        """What runs with the other seeds; a cell for which nothing could be chosen is left out."""
        return [self.jobs[cell, seed, chosen[cell]] for seed in self.seeds[1:] for cell in self.cells if cell in chosen]


def identity_key(config: dict[str, Any]) -> str:
    """What tells one job from another, wherever it is kept."""
    return json.dumps({key: value for key, value in config.items() if key not in PLACES}, sort_keys=True)


def said(values: dict[str, Any], groups: Any) -> str:
    """Values in words: options of groups by their name alone, other values with their key."""
    return " ".join(str(value) if key in groups else word(key, value).replace("'", "") for key, value in values.items())


def folder_name(cell: str, seed: int | None, tuned: str) -> str:
    """A readable name, of letters, digits and . = + - alone; what that changes or cuts, a hash keeps apart."""
    wanted = "-".join(part for part in (cell, "" if seed is None else f"seed{seed}", tuned) if part)
    name = re.sub(r"[^\w.=+-]", "_", wanted.replace(" ", "-"), flags=re.ASCII)[:_LONGEST_NAME]
    return name if name == wanted.replace(" ", "-") else f"{name}-{hashlib.sha256(wanted.encode()).hexdigest()[:8]}"


def plan_of(section: Section, composer: Composer) -> Plan:
    """Compose and check every job.

    Raises:
        ConfigError: anything wrong but combinations that cannot be built; two combinations that are the same job; none that can be built.
    """
    axes = {key: values for key, values in section.over.items() if key != "seed"}
    combinations = [dict(zip(axes, values)) for values in itertools.product(*axes.values())]
    choices = [dict(zip(section.tune, values)) for values in itertools.product(*section.tune.values())]
    grid = {said(values, composer.options): values for values in choices}

    def words(*parts: dict[str, Any]) -> list[str]:
        given = [word(key, value) for part in parts for key, value in part.items()]
        return [f"recipe={section.recipe}", *section.words, *given]

    seeds = section.over.get("seed") or [composer.compose(words(combinations[0], choices[0]))["seed"]]
    plan = Plan(section, [], seeds, grid, [], {})
    for combination in combinations:
        cell = said(combination, composer.options)
        try:
            configs = {tuned: _configs(words(combination, values), seeds, section, composer) for tuned, values in grid.items()}
        except ConfigError as error:
            if not not_possible(error):
                raise
            plan.impossible.append((cell, f"{error.where}: {error.found}"))
            continue
        plan.cells.append(cell)
        for tuned, of_seed in configs.items():
            for seed, config in of_seed.items():
                name = folder_name(cell, seed if "seed" in section.over else None, tuned) or "job"
                plan.jobs[cell, seed, tuned] = Job(name, cell, seed, tuned, config)
    if not plan.cells:
        raise ConfigError("sweep.over", f"no combination that can be built ({plan.impossible[0][1]})", "at least one", "Change the values.")
    _require_different(plan)
    return plan


def _configs(words: list[str], seeds: list[int], section: Section, composer: Composer) -> dict[int, dict[str, Any]]:
    """The configuration of a combination for every seed. Composed once, unless it could depend on the seed in more than that."""
    texts = [*(str(recipe.content) for recipe in lineage(section.recipe, composer.recipes)), *words]
    if any("${" in text for text in texts):
        found = {seed: composer.compose([*words, word("seed", seed)]) for seed in seeds}
    else:
        first = composer.compose([*words, word("seed", seeds[0])])
        found = {seed: {**first, "seed": seed} for seed in seeds}
    for config in found.values():
        validate(config)
        one_device(config, "in a sweep")
    return found


def _require_different(plan: Plan) -> None:
    seen: dict[str, Job] = {}
    names: dict[str, Job] = {}
    for job in plan.jobs.values():
        for known, key in ((seen, job.key), (names, job.name)):
            if (twin := known.setdefault(key, job)) is not job:
                todo = "Take out one, or the override that makes them alike."
                raise ConfigError("sweep.over", f"the same job as '{twin.label}' and '{job.label}'", "jobs that differ", todo)


def one_device(config: dict[str, Any], told: str) -> None:
    """
    Raises:
        ConfigError: a job of a sweep on several devices: the processes that Lightning starts for them repeat the command line, and each
            would start the whole sweep.
    """
    trainer = config["trainer"] | config["trainer"]["options"]
    if trainer["devices"] not in (1, "1") or trainer.get("num_nodes", 1) != 1:
        found = f"{trainer['devices']!r} {told}"
        raise ConfigError("trainer.devices", found, "1 in a sweep", "Run the jobs one by one, or set trainer.devices=1.")
