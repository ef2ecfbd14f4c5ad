"""Runs into cells: a cell is all runs that differ only in their seed; what differs between cells decides what is shown.

Two kinds of differences. A *variant* is what is compared (the folding strategy, unless --by says otherwise), a *setting* is what it is
compared in (bits, data, network, optimizer, ...). Keys of the strategy and of the optimizer that have one value for each variant in each
setting, such as a strategy's own freeze step or a learning rate, belong to the cell and split nothing; nor do keys that a sweep tuned.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qat.choose import check_name
from qat.errors import ConfigError
from qat.report.compare_palette import in_order
from qat.report.compare_runs import LeftOut, Run

STRATEGY = "fold.name"
BITS, ACTIVATION_BITS, PER_CHANNEL = "quant.weight.bits", "quant.activation.bits", "quant.weight.per_channel"
_GRID = (BITS, ACTIVATION_BITS, PER_CHANNEL)
SEEDS = ("data.split_seed", "float_training.seed")  # these may follow the run's seed
FOLLOWS = "the run's seed"
# nothing of these changes what a run computes
_IGNORED = {"seed", "recipe", "run_root", "resume", "data.workers", "data.eval_batch_size", "trainer.log_every_n_steps"}
_IGNORED_SECTIONS = ("report.", "sweep.")
_DETAILS = ("fold.", "optim.")  # keys that may follow the variant
_FIRST = (*_GRID, "model.name", "data.name")


@dataclass(frozen=True)
class Cell:
    """Runs of one variant in one setting, by seed; `keys` are its values of every key that differs somewhere."""

    variant: str
    setting: str
    runs: dict[int, Run]
    keys: dict[str, Any]


@dataclass(frozen=True)
class Cells:
    """Every cell, with the names of variants and settings in the order in which they are shown.

    Args:
        same: keys that are equal in all runs.
        differing: keys that are not, in the order of the configuration.
        usual: the commonest value of keys that the name of a setting mentions only where they differ from it.
        details: those among `differing` that follow the cell.
    """

    cells: list[Cell]
    variants: list[str]
    settings: list[str]
    same: dict[str, Any]
    differing: list[str]
    usual: dict[str, Any]
    details: list[str]
    by: list[str]
    duplicates: list[LeftOut] = field(default_factory=list)

    def at(self, variant: str, setting: str) -> Cell | None:
        return next((cell for cell in self.cells if (cell.variant, cell.setting) == (variant, setting)), None)

    def of(self, setting: str) -> list[Cell]:
        """The cells of a setting in the order of the variants."""
        found = (self.at(variant, setting) for variant in self.variants)
        return [cell for cell in found if cell is not None]


def grid_label(config: dict[str, Any]) -> str:
    """W4A8 per tensor."""
    return f"W{config.get(BITS)}A{config.get(ACTIVATION_BITS)} per {'channel' if config.get(PER_CHANNEL) else 'tensor'}"


def text(value: Any) -> str:
    """A value as YAML would show it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def into_cells(runs: Sequence[Run], by: Sequence[str] = (), tuned: Sequence[str] = ()) -> Cells:
    """Group runs.

    Args:
        runs: at least one.
        by: keys, or groups of keys such as optim, whose values are compared; () for the strategy.
        tuned: keys or groups whose values were chosen for each cell.

    Raises:
        ConfigError: a key of `by` that no configuration has.
    """
    configs = _configs(runs)
    keys = list(dict.fromkeys(key for config in configs for key in config))
    differing = [key for key in keys if len({config.get(key) for config in configs}) > 1]
    chosen, following = _compared_keys(by or [STRATEGY], configs, keys, differing)
    of_cell = [key for key in differing if key not in chosen and any(_below(key, name) for name in tuned)]
    variant_keys, setting_keys, details = _roles(configs, [key for key in differing if key not in [*of_cell, *following]], chosen)
    details = [key for key in differing if key in [*details, *of_cell, *following]]
    groups: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for i, config in enumerate(configs):
        groups[_values(config, variant_keys), _values(config, setting_keys)].append(i)
    variant_names = _names(configs, variant_keys, chosen)
    setting_names, usual = _setting_names(configs, setting_keys)
    cells, duplicates = [], []
    for (variant, setting), members in groups.items():
        kept, doubled = _newest([runs[i] for i in members])
        duplicates += doubled
        own = {key: configs[members[0]].get(key) for key in differing}
        cells.append(Cell(variant_names[variant], setting_names[setting], kept, own))
    order = {
        setting_names[_values(c, setting_keys)]: (-_bits(c, BITS), -_bits(c, ACTIVATION_BITS), not c.get(PER_CHANNEL)) for c in configs
    }
    settings = sorted(order, key=lambda name: (order[name], name))
    same = {key: configs[0].get(key) for key in keys if key not in differing}
    return Cells(cells, in_order({cell.variant for cell in cells}), settings, same, differing, usual, details, chosen, duplicates)


def _below(key: str, name: str) -> bool:
    """Is the key `name`, or one of that group?"""
    return key == name or key.startswith(f"{name}.")


def _compared_keys(by: Sequence[str], configs: list[dict[str, Any]], keys: list[str], differing: list[str]) -> tuple[list[str], list[str]]:
    """(keys that tell the variants apart, keys that follow those): of a group its name if that is enough, else as few as are.

    Raises:
        ConfigError: neither a key nor a group.
    """
    named: list[str] = []
    following: list[str] = []
    for name in by:
        if name == "seed":
            raise ConfigError("--by", "seed", "a key whose values are compared", "Leave it out: runs of several seeds are always averaged.")
        if name in keys:
            named.append(name)
            continue
        group = sorted((key for key in keys if _below(key, name)), key=lambda key: key != f"{name}.name")
        if not group:
            check_name("--by", name, keys)
        own = [key for key in group if key in differing]
        first = group[:1] if not own else []
        for key in own:
            if len({_values(c, [*first, key]) for c in configs}) > len({_values(c, first) for c in configs}):
                first.append(key)
        named += first
        following += [key for key in own if key not in first]
    return named, following


def _configs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Configurations without what changes nothing; seeds as they come out, or told to follow the run's where in all like runs they do."""
    kept = [{k: v for k, v in run.config.items() if k not in _IGNORED and not k.startswith(_IGNORED_SECTIONS)} for run in runs]
    like = defaultdict(list)
    for run, config in zip(runs, kept):
        like[json.dumps({k: v for k, v in config.items() if k not in SEEDS}, sort_keys=True)].append((run, config))
    for group in like.values():
        for key, of in zip(SEEDS, (run_split_seed, run_float_seed)):
            follow = all(of(run) == run.seed for run, _ in group)
            for run, config in group:
                config[key] = FOLLOWS if follow else of(run)
    return kept


def run_float_seed(run: Run) -> Any:
    """As `qat.train.seeds.float_seed`: a null is the run's seed."""
    own = run.config.get("float_training.seed")
    return run.seed if own is None else own


def run_split_seed(run: Run) -> Any:
    """As `qat.train.seeds.split_seed`: a null is the float training's seed."""
    own = run.config.get("data.split_seed")
    return run_float_seed(run) if own is None else own


def _values(config: dict[str, Any], keys: Iterable[str]) -> tuple[Any, ...]:
    return tuple(config.get(key) for key in keys)


def _roles(configs: list[dict[str, Any]], differing: list[str], by: list[str]) -> tuple[list[str], list[str], list[str]]:
    """(keys of the variant, of the setting, of neither)."""
    fine = [key for key in differing if key.startswith(_DETAILS) and not key.endswith(".name") and key not in by]
    coarse = [key for key in differing if key not in fine and key not in by]
    groups = defaultdict(list)
    for config in configs:
        groups[_values(config, [*by, *coarse])].append(config)
    split = [key for key in fine if any(len({config.get(key) for config in group}) > 1 for group in groups.values())]
    own = [key for key in split if key.startswith("fold.") and STRATEGY in by]
    return by + own, coarse + [key for key in split if key not in own], [key for key in fine if key not in split]


def _names(configs: list[dict[str, Any]], keys: list[str], by: list[str]) -> dict[tuple[Any, ...], str]:
    """Variants by the values of `by`, and of other keys as far as they tell apart those with the same."""
    found = list(dict.fromkeys(_values(config, keys) for config in configs))
    names = {}
    for values in found:
        rivals = [other for other in found if other[: len(by)] == values[: len(by)]]
        parts = [text(value) if key in (STRATEGY, "model.name") else f"{key} {text(value)}" for key, value in zip(by, values)]
        for i in range(len(by), len(keys)):
            if len({other[i] for other in rivals}) > 1:
                parts.append(f"{keys[i].removeprefix('fold.')} {text(values[i])}")
        names[values] = ", ".join(parts)
    return names


def _setting_names(configs: list[dict[str, Any]], keys: list[str]) -> tuple[dict[tuple[Any, ...], str], dict[str, Any]]:
    """The grids, and as few other keys as tell the settings apart, each where it is not the commonest; and those commonest values."""
    example = {_values(config, keys): config for config in configs}.values()
    shown: list[str] = []
    for key in sorted(keys, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        if len({_values(c, [*_GRID, *shown, key]) for c in example}) > len({_values(c, [*_GRID, *shown]) for c in example}):
            shown.append(key)
    plain = [key for key in shown if key in ("model.name", "data.name")]
    others = [key for key in shown if key not in _GRID and key not in plain]
    usual = {key: Counter(config.get(key) for config in example).most_common(1)[0][0] for key in others}
    names = {}
    for config in example:
        told = [f"{key} {text(config.get(key))}" for key in others if config.get(key) != usual[key]]
        names[_values(config, keys)] = ", ".join([grid_label(config), *(text(config.get(key)) for key in plain), *told])
    return names, usual


def _bits(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _newest(runs: list[Run]) -> tuple[dict[int, Run], list[LeftOut]]:
    """The newest run of each seed, by seed, and the others."""
    kept: dict[int, Run] = {}
    left = []
    for run in sorted(runs, key=lambda run: (run.when, str(run.folder))):
        if (older := kept.get(run.seed)) is not None:
            left.append(LeftOut(older.folder, "duplicate", f"the same configuration and seed as the newer {run.folder}", older.config))
        kept[run.seed] = run
    return dict(sorted(kept.items())), left
