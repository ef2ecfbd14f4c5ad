"""What a sweep recipe sweeps: its section `sweep`, and what the command line changes in it.

sweep:
  over: {fold: [naive, static], quant: [w8a8_per_tensor, w4a8_per_channel], seed: [0, 1, 2]}
  tune: {optim.lr: [0.003, 0.01]}    # chosen for every combination but the seed, on the validation split, with the first seed
  baseline: static                   # value of the strategy, or of what else is compared, that the others are compared with
"""

from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import Override, QuotedString

from qat.cli.compose import Composer, check_key
from qat.cli.words import text, word
from qat.errors import ConfigError
from qat.report.compare_names import text as as_yaml
from qat.train.problems import Problems

PARTS = ("over", "tune", "baseline")
OPTIONS = {"retry": "run failed jobs again", "new": "start again from nothing", "verbose": "show what the jobs log"}
_NOT_SWEPT = ("recipe", "resume", "run_root", "sweep", "hydra")


@dataclass(frozen=True)
class Section:
    """A sweep: every combination of the values of `over`, each with the best of those of `tune`.

    Attributes:
        over: key or group -> values, the first key varying slowest; `seed` among them or not.
        tune: key or group -> values to choose from.
        baseline: strategy, or value of what else is compared.
        words: overrides of every job.
        options: those of OPTIONS that are switched on.
    """

    recipe: str
    over: dict[str, list[Any]]
    tune: dict[str, list[Any]]
    baseline: str | None = None
    words: tuple[str, ...] = ()
    options: frozenset[str] = field(default_factory=frozenset)


def command_of(section: Section) -> list[str]:
    """Words that start the same sweep, whatever is in its recipe by then."""
    axes = [word(f"sweep.{part}.{key}", values) for part in ("over", "tune") for key, values in getattr(section, part).items()]
    return [f"recipe={section.recipe}", *section.words, *axes, word("sweep.baseline", section.baseline)]


def plain(value: Any) -> Any:
    """A parsed value without Hydra's own types."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [plain(entry) for entry in value]
    return {plain(key): plain(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def values_of(override: Override) -> list[Any]:
    """The values an override gives to its key."""
    return [plain(value) for value in (override.sweep_iterator() if override.is_sweep_override() else [override.value()])]


def section_of(recipe: str, raw: Any, composer: Composer, prefix: str = "", **more: Any) -> Section:
    """A section as it was written, checked.

    Args:
        prefix: the file it stands in, for messages.

    Raises:
        ConfigError: everything wrong with it, a line each.
    """
    problems, example = Problems(), "Write sweep: {over: {fold: [naive, static], seed: [0, 1]}}."
    where = f"{prefix}sweep"
    if not isinstance(raw, dict):
        raise ConfigError(where, repr(raw), f"a mapping with {', '.join(PARTS)}", example)
    for key in raw:
        problems.name(f"{where}.{key}", str(key), PARTS, what="an unknown key")
    parts: dict[str, dict[str, list[Any]]] = {}
    for part in ("over", "tune"):
        parts[part] = given = raw.get(part) or {}
        if not isinstance(given, dict):
            problems.add(f"{where}.{part}", repr(given), "a mapping of keys or groups to lists of values", example)
            continue
        for key, values in given.items():
            _check_axis(f"{where}.{part}.", str(key), values, composer, problems)
    if not parts["over"]:
        problems.add(f"{where}.over", "nothing", "at least one key or group with its values", example)
    for key in (key for key in parts["tune"] if key in parts["over"] or key == "seed"):
        found = "a key that is in over too" if key != "seed" else "the seed"
        problems.add(f"{where}.tune.{key}", found, "a key of its own", f"Take {key} out of tune.")
    if raw.get("baseline") is not None:
        problems.name(f"{where}.baseline", as_yaml(raw["baseline"]), _baselines(parts["over"], composer))
    problems.raise_any()
    return Section(recipe, dict(parts["over"]), dict(parts["tune"]), raw.get("baseline"), **more)


def compared_key(over: dict[str, Any]) -> str | None:
    """What a sweep compares: the strategies where it has several, else the first key with several values; None with nothing but seeds."""
    keys = sorted((key for key in over if key != "seed"), key=lambda key: (len(over[key]) < 2, key != "fold"))
    return keys[0] if keys else None


def _baselines(over: dict[str, list[Any]], composer: Composer) -> list[str]:
    """What may be compared with: a strategy, swept or not, and the values of the key that is compared."""
    swept = {key: values for key, values in over.items() if isinstance(values, list)}
    key = compared_key(swept)
    own = [as_yaml(value) for value in swept[key]] if key is not None and key not in composer.options else []
    return [*own, *composer.options["fold"]]


def _check_axis(prefix: str, key: str, values: Any, composer: Composer, problems: Problems) -> None:
    if key.replace("/", ".").partition(".")[0] in _NOT_SWEPT:
        return problems.add(prefix + key, "a key that says where or what to run", "a key or group of a job", "Take it out.")
    if not isinstance(values, list) or not values:
        found = repr(values) if values != [] else "an empty list"
        return problems.add(prefix + key, found, "a list of values", f"Write {key}: [A, B].")
    texts = [text(value) for value in values]
    if twice := sorted({said for said in texts if texts.count(said) > 1}):
        problems.add(prefix + key, f"{', '.join(twice)} twice", "every value once", "Take the copies out.")
    if key == "seed" and not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return problems.add(prefix + key, repr(values), "whole numbers", "Write seed: [0, 1, 2].")
    if key in composer.options:
        for value in values:
            problems.name(prefix + key, value, composer.options[key])
    else:
        check_key(key, list(composer.options), problems, prefix)


def changed(section: Section, overrides: list[Override], composer: Composer) -> Section:
    """A section with what the command line says.

    `sweep.over.KEY=[A,B]` and, in short, KEY=A,B or KEY=A for a key that is swept or tuned give its values; a value list for another
    key sweeps over it too; `~sweep.over.KEY` stops sweeping over it. Everything else is for every job.

    Raises:
        ConfigError: everything wrong with it, a line each.
    """
    raw: dict[str, Any] = {"over": dict(section.over), "tune": dict(section.tune), "baseline": section.baseline}
    words, options, problems = list(section.words), set(section.options), Problems()
    for override in overrides:
        key = override.key_or_group
        part, _, inner = key.removeprefix("sweep.").partition(".")
        if key == "sweep" or (key.startswith("sweep.") and part not in (*PARTS, *OPTIONS)):
            problems.name(key, part, (*PARTS, *OPTIONS), what="an unknown key")
        elif key.startswith("sweep.") and part in OPTIONS:
            if not isinstance(override.value(), bool) or inner:
                problems.add(key, str(override.input_line), f"true or false: {OPTIONS[part]}", f"Write sweep.{part}=true.")
            elif override.value():
                options.add(part)
        elif key.startswith("sweep.") and inner and isinstance(raw[part], dict):
            if not override.is_delete():
                raw[part][inner] = values_of(override) if override.is_sweep_override() else plain(override.value())
            elif raw[part].pop(inner, None) is None:
                problems.name(key, inner, raw[part], what="a key that is not swept")
        elif key.startswith("sweep."):
            raw[part] = None if override.is_delete() else plain(override.value())
        elif not override.is_delete() and (key in raw["over"] or key in raw["tune"] or override.is_sweep_override()):
            raw["tune" if key in raw["tune"] else "over"][key] = values_of(override)
        else:
            words.append(str(override.input_line))
    problems.raise_any()
    composer.check(composer.parse(words))
    return replace(section_of(section.recipe, raw, composer), words=tuple(words), options=frozenset(options))
