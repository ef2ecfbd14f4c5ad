"""Configurations of runs as a comparison looks at them: without what changes no result, with seeds as they come out."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat.report.compare_names import text
from qat.report.compare_runs import Run

SEEDS = ("data.split_seed", "float_training.seed")  # these may follow the run's seed
FOLLOWS = "the run's seed"
# nothing of these changes what a run computes
_IGNORED = {"seed", "recipe", "run_root", "resume", "data.workers", "data.eval_batch_size", "trainer.log_every_n_steps"}
_IGNORED_SECTIONS = ("report.", "sweep.")
Tuned = Mapping[Path, Mapping[str, Sequence[Any]]]  # folder of a sweep -> key or group -> values it chose from for every cell


def run_float_seed(run: Run) -> Any:
    """As `qat.train.seeds.float_seed`: a null is the run's seed."""
    own = run.config.get("float_training.seed")
    return run.seed if own is None else own


def run_split_seed(run: Run) -> Any:
    """As `qat.train.seeds.split_seed`: a null is the float training's seed."""
    own = run.config.get("data.split_seed")
    return run_float_seed(run) if own is None else own


def below(key: str, name: str) -> bool:
    """Is the key `name`, or one of that group?"""
    return key == name or key.startswith(f"{name}.")


def compared_configs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Dotted key -> value, for each run.

    A seed that may follow the run's is told to follow it where it does in all runs that are else alike. One run alone does not say whether
    it does: its seed is taken for the fixed one of other runs where it is that.
    """
    kept = [{k: v for k, v in run.config.items() if k not in _IGNORED and not k.startswith(_IGNORED_SECTIONS)} for run in runs]
    like = defaultdict(list)
    for run, config in zip(runs, kept):
        like[json.dumps({k: v for k, v in config.items() if k not in SEEDS}, sort_keys=True)].append((run, config))
    for key, of in zip(SEEDS, (run_split_seed, run_float_seed)):
        following = [group for group in like.values() if all(of(run) == run.seed for run, _ in group)]
        fixed = {of(run) for group in like.values() if group not in following for run, _ in group}
        for group in like.values():
            alone = len({run.seed for run, _ in group}) == 1
            follows = group in following and not (alone and of(group[0][0]) in fixed)
            for run, config in group:
                config[key] = FOLLOWS if follows else of(run)
    return kept


def without_choice(runs: Sequence[Run], configs: list[dict[str, Any]], tuned: Tuned) -> list[dict[str, Any]]:
    """The same with what was chosen for the cell of a run in the place of the value: it does not tell two cells apart.

    Args:
        tuned: of every sweep that has runs among these.
    """
    hidden = []
    for run, config in zip(runs, configs):
        parents = set(run.folder.resolve().parents)
        choices = {name: values for folder, keys in tuned.items() if folder.resolve() in parents for name, values in keys.items()}
        told = {name: f"one of {', '.join(map(text, values))}" for name, values in choices.items()}
        hidden.append({key: next((told[name] for name in told if below(key, name)), value) for key, value in config.items()})
    return hidden
