"""A configuration as a recipe: what it has beside the recipe it was composed from, as a file and as words for the command line."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qat.cli.compose import Composer
from qat.cli.recipes import Recipe, runnable, sweep_of
from qat.cli.words import word
from qat.errors import ConfigError
from qat.train.config import is_open, schema

# what a run is called, where it is written to and what it goes on from is no part of what it computes
_PLACES = ("recipe", "run_root", "resume")


@dataclass(frozen=True)
class Written:
    """A recipe's text below its header, and the words after `python train.py` that give the same; None where no words do."""

    text: str
    words: list[str] | None

    @property
    def command(self) -> str | None:
        return None if self.words is None else shlex.join(["python", "train.py", *self.words])


def recipe_of(config: dict[str, Any], name: str, recipes: dict[str, Recipe]) -> Written:
    """A recipe `name` that composes to `config`: on top of the recipe that it names, else, where that is none of `recipes` or cannot lead
    there (keys that it has and `config` lacks), on top of the defaults.

    Raises:
        ConfigError: neither does.
    """
    bases = [config["recipe"]] if config["recipe"] in runnable(recipes) and config["recipe"] != name else []
    for base in [*bases, None]:
        found = _on_top_of(base, config, recipes)
        if found is None:
            continue
        groups, content = found
        defaults = [*([base] if base else []), *({f"override /{group}": option} for group, option in groups.items())]
        swept = base is not None and sweep_of(base, recipes) is not None  # one job of a sweep is no sweep
        whole = {**({"defaults": defaults} if defaults else {}), **content, **({"sweep": None} if swept else {})}
        recipe = Recipe(name, Path(f"{name}.yaml"), own=True, content=whole)
        if not _composes([f"recipe={name}"], config, {**recipes, name: recipe}):
            continue
        words = [f"recipe={base}", *(f"{group}={option}" for group, option in groups.items()), *_words(content)]
        same = base is not None and not swept and _composes(words, config, recipes)
        return Written(OmegaConf.to_yaml(OmegaConf.create(whole)), words if same else None)
    raise ConfigError(f"recipe {name}", "settings that no recipe leads to", "keys of configs/", "Write the overrides by hand.")


def _on_top_of(base: str | None, wanted: dict[str, Any], recipes: dict[str, Recipe]) -> tuple[dict[str, str], dict[str, Any]] | None:
    """(option of each group, what remains to be set) from what `base` composes to; None where it does not compose."""
    words, groups = [f"recipe={base}"] if base else [], dict[str, str]()
    with Composer(recipes) as composer:
        plain = _composed(words, composer)
        if plain is None:
            return None
        for group in (group for group in composer.options if group != "recipe"):
            least = _count(difference(plain[group], wanted[group]))
            for option in composer.options[group] if least else ():
                other = _composed([*words, f"{group}={option}"], composer)
                if other is not None and (count := _count(difference(other[group], wanted[group]))) < least:
                    least, groups[group] = count, option
        plain = _composed([*words, *(f"{group}={option}" for group, option in groups.items())], composer)
    if plain is None:
        return None
    return groups, {key: value for key, value in difference(plain, wanted).items() if key not in _PLACES}


def _composed(words: list[str], composer: Composer) -> dict[str, Any] | None:
    try:
        return composer.compose(words)
    except ConfigError:
        return None


def _composes(words: list[str], wanted: dict[str, Any], recipes: dict[str, Recipe]) -> bool:
    """Whether the words give the configuration, its overrides in their order, in which later ones win."""
    with Composer(recipes) as composer:
        found = _composed(words, composer)
    if found is None or list(found["quant"]["overrides"]) != list(wanted["quant"]["overrides"]):
        return False
    return all(found[key] == value for key, value in wanted.items() if key not in _PLACES)


def difference(have: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
    """What has to be merged into `have` to give `want`, nested as they are. Keys that `want` lacks cannot be taken out so."""
    found = {}
    for key, value in want.items():
        if isinstance(value, dict) and isinstance(have.get(key), dict):
            if below := difference(have[key], value):
                found[key] = below
        elif key not in have or have[key] != value:
            found[key] = value
    return found


def _count(content: Any) -> int:
    return sum(map(_count, content.values())) if isinstance(content, dict) and content else int(content != {})


def _words(content: dict[str, Any], path: str = "", node: Any = None) -> list[str]:
    """KEY=VALUE of everything in `content`; a mapping of the user's own keys, which may have dots, in one piece."""
    node, found = schema() if node is None else node, []
    for key, value in content.items():
        below = node._get_node(key)
        if isinstance(value, dict) and not is_open(below):
            found += _words(value, f"{path}{key}.", below)
        else:
            found.append(word(f"{path}{key}", value))
    return found
