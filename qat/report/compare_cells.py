"""Runs into cells: a cell is all runs that differ only in their seed; what differs between cells decides what is shown.

Two kinds of differences. A *variant* is what is compared (the folding strategy, unless --by says otherwise), a *setting* is what it is
compared in (bits, data, network, optimizer, ...). Keys of the strategy and of the optimizer that have one value for each variant in each
setting, such as a strategy's own freeze step or a learning rate, belong to the cell and split nothing; nor do keys that a sweep tuned.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qat.choose import check_name
from qat.errors import ConfigError
from qat.report.compare_configs import Tuned, below, compared_configs, without_choice
from qat.report.compare_names import ACTIVATION_BITS, BITS, PER_CHANNEL, STRATEGY, setting_names, values, variant_names
from qat.report.compare_palette import in_order
from qat.report.compare_runs import LeftOut, Run

_DETAILS = ("fold.", "optim.")  # keys that may follow the variant


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


def into_cells(runs: Sequence[Run], by: Sequence[str] = (), tuned: Tuned | None = None) -> Cells:
    """Group runs.

    Args:
        runs: at least one.
        by: keys, or groups of keys such as optim, whose values are compared; () for the strategy.
        tuned: what sweeps chose for each of their cells.

    Raises:
        ConfigError: a key of `by` that no configuration has.
    """
    full = compared_configs(runs)
    configs = without_choice(runs, full, tuned or {})
    keys = list(dict.fromkeys(key for config in configs for key in config))
    telling, differing = _differing(configs, keys), _differing(full, keys)
    chosen, following = _compared_keys(by or [STRATEGY], configs, keys, telling)
    variant_keys, setting_keys = _roles(configs, [key for key in telling if key not in following], chosen)
    groups: dict[tuple[Any, Any], list[int]] = defaultdict(list)
    for i, config in enumerate(configs):
        groups[values(config, variant_keys), values(config, setting_keys)].append(i)
    variants = variant_names(configs, variant_keys, chosen)
    settings, usual = setting_names(configs, setting_keys, [*chosen, *following])
    cells, duplicates = [], []
    for (variant, setting), members in groups.items():
        kept, doubled = _newest([runs[i] for i in members])
        duplicates += doubled
        own = {key: full[members[0]].get(key) for key in differing}
        cells.append(Cell(variants[variant], settings[setting], kept, own))
    order = {settings[values(c, setting_keys)]: (-_bits(c, BITS), -_bits(c, ACTIVATION_BITS), not c.get(PER_CHANNEL)) for c in configs}
    same = {key: full[0].get(key) for key in keys if key not in differing}
    return Cells(
        cells,
        in_order({cell.variant for cell in cells}),
        sorted(order, key=lambda name: (order[name], name)),
        same,
        differing,
        usual,
        [key for key in differing if key not in [*variant_keys, *setting_keys]],
        chosen,
        duplicates,
    )


def _differing(configs: list[dict[str, Any]], keys: list[str]) -> list[str]:
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


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
        group = sorted((key for key in keys if below(key, name)), key=lambda key: key != f"{name}.name")
        if not group:
            check_name("--by", name, keys)
        own = [key for key in group if key in differing]
        first = group[:1] if not own else []
        for key in own:
            if len({values(c, [*first, key]) for c in configs}) > len({values(c, first) for c in configs}):
                first.append(key)
        named += first
        following += [key for key in own if key not in first]
    return named, following


def _roles(configs: list[dict[str, Any]], differing: list[str], by: list[str]) -> tuple[list[str], list[str]]:
    """(keys of the variant, of the setting); what is left belongs to the cell."""
    fine = [key for key in differing if key.startswith(_DETAILS) and not key.endswith(".name") and key not in by]
    coarse = [key for key in differing if key not in fine and key not in by]
    groups = defaultdict(list)
    for config in configs:
        groups[values(config, [*by, *coarse])].append(config)
    split = [key for key in fine if any(len({config.get(key) for config in group}) > 1 for group in groups.values())]
    own = [key for key in split if key.startswith("fold.") and STRATEGY in by]
    return by + own, coarse + [key for key in split if key not in own]


def _bits(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0


def _newest(runs: list[Run]) -> tuple[dict[int, Run], list[LeftOut]]:
    """The newest run of each seed, by seed, and the others."""
    kept: dict[int, Run] = {}
    left = []
    for run in sorted(runs, key=lambda run: (run.when, str(run.folder))):
        if (older := kept.get(run.seed)) is not None:
            left.append(LeftOut(older.folder, "duplicate", f"the same cell and seed as the newer {run.folder}", older.config))
        kept[run.seed] = run
    return dict(sorted(kept.items())), left
