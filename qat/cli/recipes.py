"""Recipes: flat YAML files with a header, found in the package and in the user's own ./recipes.

Each becomes an option of Hydra's group `recipe` that is written at the top level of the configuration (package `_global_`). Files in
subfolders, such as recipes/base/, are for other recipes to build on and cannot be run themselves.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from qat.cli.folders import packaged
from qat.errors import ConfigError

_FIELD = re.compile(r"#\s?(\w+):\s*(.*)")
_CONTINUED = re.compile(r"#\s{2,}(\S.*)")


@dataclass
class Recipe:
    """One file. `name` is its path below recipes/ without the suffix."""

    name: str
    path: Path
    own: bool  # the user's, not the package's
    header: dict[str, str] = field(default_factory=dict)  # what, why, paper, command, measured
    content: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None  # why the file cannot be read

    @property
    def defaults(self) -> list[Any]:
        """The defaults list, with the recipe's own values last: Hydra would let a base win over the recipe built on it."""
        listed = list(self.content.get("defaults") or [])
        return listed if "_self_" in listed else [*listed, "_self_"]

    @property
    def job(self) -> dict[str, Any]:
        """The content without its section `sweep`, which is no part of a job's configuration."""
        return {key: value for key, value in self.content.items() if key != "sweep"}

    @property
    def bases(self) -> list[str]:
        """Names of the recipes it builds on directly."""
        folder = self.name.rpartition("/")[0]
        named = [item for item in self.defaults if isinstance(item, str) and item != "_self_"]
        return [item.removeprefix("/recipe/") if item.startswith("/") else f"{folder}/{item}".lstrip("/") for item in named]

    @property
    def choices(self) -> dict[str, str]:
        """Group -> option, of its `override /group: option` lines."""
        pairs = [pair for item in self.defaults if isinstance(item, dict) for pair in item.items()]
        return {str(key).removeprefix("override").strip(" /").split("@")[0]: str(value) for key, value in pairs}


def read_header(text: str) -> dict[str, str]:
    """The `# field: text` lines at the top of a recipe; a line indented further goes on with the field above."""
    header: dict[str, str] = {}
    last = None
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if match := _FIELD.match(line):
            last = match[1]
            header[last] = match[2]
        elif last and (match := _CONTINUED.match(line)):
            header[last] = f"{header[last]} {match[1]}".strip()
    return header


def read_recipe(name: str, path: Path, own: bool) -> Recipe:
    """A file that cannot be read gives a recipe that says so when it is chosen."""
    recipe = Recipe(name, path, own)
    try:
        recipe.header = read_header(path.read_text(encoding="utf-8"))
        content = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(content, dict) or not isinstance(content.get("defaults") or [], list):
            raise ValueError("not a mapping, or its `defaults` not a list")
        recipe.content = {str(key): value for key, value in content.items()}
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        recipe.broken = " ".join(str(error).split())
    return recipe


def find_recipes(own: Path | None = None) -> dict[str, Recipe]:
    """All recipes by name, the user's (./recipes, or `own`) in place of the package's of the same name."""
    shipped, found = packaged("recipes"), {}
    own = Path("recipes") if own is None else own
    for folder in (shipped, own):
        if folder is own and (not own.is_dir() or own.resolve() == shipped.resolve()):
            continue
        for path in sorted(folder.rglob("*.yaml")):
            name = path.relative_to(folder).with_suffix("").as_posix()
            found[name] = read_recipe(name, path, folder is own)
    return found


def runnable(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """The recipes a user can name: those not in a subfolder."""
    return {name: recipe for name, recipe in recipes.items() if "/" not in name}


def lineage(name: str, recipes: dict[str, Recipe]) -> list[Recipe]:
    """The recipe and all it builds on, nearest first.

    Raises:
        ConfigError: a base that does not exist, a file that cannot be read, or recipes that build on each other in a circle.
    """
    chain: list[Recipe] = []

    def visit(name: str, asked_by: str, above: tuple[str, ...]) -> None:
        if name not in recipes:
            expected = "one of " + ", ".join(sorted(set(recipes) - set(runnable(recipes)))[:12])
            raise ConfigError(f"{asked_by}: defaults", f"the unknown base {name!r}", expected, "Correct the defaults list.")
        recipe = recipes[name]
        if recipe.broken or name in above:
            found = recipe.broken or f"a circle of bases {' -> '.join([*above, name])}"
            raise ConfigError(str(recipe.path), found, "a recipe", "Correct the file.")
        chain.append(recipe)
        for base in recipe.bases:
            visit(base, str(recipe.path), (*above, name))

    visit(name, "recipe", ())
    return chain


def sweep_of(name: str, recipes: dict[str, Recipe]) -> Any:
    """The section `sweep` of a recipe, as written: that of its bases, changed key by key by its own, where null takes a key out.

    Returns:
        None for a recipe of one run.

    Raises:
        ConfigError: as `lineage`.
    """
    section: Any = None
    for recipe in reversed(lineage(name, recipes)):
        if "sweep" in recipe.content:
            section = _changed(section, recipe.content["sweep"])
    return section


def _changed(base: Any, own: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    merged = {key: _changed(base.get(key), value) for key, value in own.items()}
    return {key: value for key, value in {**base, **merged}.items() if value is not None}


def register(recipes: dict[str, Recipe]) -> None:
    """Make the recipes, and no others, the options of Hydra's group `recipe`."""
    store = ConfigStore.instance()
    store.repo.pop("recipe", None)  # what an earlier call in this process registered
    for recipe in recipes.values():
        if recipe.broken is None:
            group, _, name = f"recipe/{recipe.name}".rpartition("/")
            node = OmegaConf.create({**recipe.job, "defaults": recipe.defaults})
            store.store(group=group, name=name, node=node, package="_global_", provider=str(recipe.path))
