"""The layers to keep at more bits, measured together, and the recipe that says so."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qat.bars import progress_bar
from qat.cli.recipe_of import Written, recipe_of
from qat.cli.recipes import find_recipes
from qat.graph.prepared import QuantGraph
from qat.report.sensitivity import Cost
from qat.report.tables import Table, number
from qat.train.answers import Answers, answers, change
from qat.train.finished_run import FinishedRun
from qat.train.more_bits import Rebuilder, Setting, fewest, rules_for, trains, weight_bytes, with_rules

NAME = "more_bits"


@dataclass(frozen=True)
class Suggested:
    """What came out: in words; with the settings measured where there were any, and the recipe where one is worth it."""

    said: str
    table: Table | None = None
    written: Written | None = None


def suggest(
    run: FinishedRun,
    rebuild: Rebuilder,
    shipped: QuantGraph,
    batches: Sequence[tuple[Tensor, Tensor]],
    costs: list[Cost],
    unquantized: Answers,
    share: float,
) -> Suggested:
    """The fewest layers, of those whose quantizers alone raise the loss by more than noise and in that order, that bring back `share`.

    Side effects: writes more_bits.yaml into the run's folder, whole or not at all.

    Args:
        shipped: the run's network, on the device of `rebuild`.
        costs: those "alone" sorted, the largest first.
        share: of what `shipped` loses against `unquantized`.
    """
    before = answers(shipped, batches, rebuild.device)
    gap = change(unquantized, before)
    if not gap.significant:
        hint = "; --before-training measures what its float network loses" if rebuild.trained else ""
        return Suggested(f"nothing to bring back: quantization costs {gap.value:+.4f}, standard error {gap.error:.4f}{hint}")
    ranked = [cost.layer for cost in costs if cost.setting == "alone" and cost.significant]
    if not ranked:
        return Suggested("no layer alone raises the loss by more than noise: nothing to suggest")
    rules = {name: rule for name, rule in rules_for(shipped, run.config["target"]["name"]).items() if name in ranked}
    with progress_bar(shown=True) as bar:
        task = bar.add_task("giving layers more bits", total=2 * len(ranked))

        def measure(layers: tuple[str, ...], step: str) -> Setting:
            network = rebuild({name: rules[name] for name in layers})
            bar.advance(task)
            return Setting(layers, answers(network, batches, rebuild.device), weight_bytes(network), step)

        tried, best = fewest(ranked, measure, before.loss - share * gap.value, before.loss)
    will_train = trains(run.config)
    start = Setting((), before, weight_bytes(shipped), "as it is")
    table = steps_table([start, *tried], unquantized, will_train)
    if best is None or not change(best.answers, before).significant:
        return Suggested("more bits for these layers do not bring the loss down by more than noise: nothing written", table)
    said = summary(start, best, unquantized, share, will_train)
    chosen = {name: rules[name] for name in best.layers}
    written = recipe_of(with_rules(run.config, chosen), NAME, find_recipes())
    header = header_of(run.config, start, best, unquantized, will_train)
    path = run.folder / f"{NAME}.yaml"
    part = path.with_name(path.name + ".part")
    part.write_text(header + written.text, encoding="utf-8")
    os.replace(part, path)
    return Suggested(said, table, written)


def recovered(setting: Setting, start: Setting, unquantized: Answers) -> float:
    """Share of the loss that quantization costs which `setting` brings back."""
    return (start.answers.loss - setting.answers.loss) / (start.answers.loss - unquantized.loss)


def when(will_train: bool) -> str:
    return "before training with it" if will_train else "what a run with it ends with, which has no training"


def steps_table(tried: list[Setting], unquantized: Answers, will_train: bool) -> Table:
    """A row for each setting measured, the first that of the run."""
    rows: list[list[Any]] = []
    for setting in tried:
        found, back = setting.answers, f"{recovered(setting, tried[0], unquantized):.1%}"
        rows.append([setting.step, len(setting.layers), number(found.loss), f"{found.accuracy:.4f}", back, f"{setting.bytes / 1000:.1f}"])
    note = f"Each setting measured as a whole, {when(will_train)}; back: share of the loss that quantization costs."
    return Table("More bits", ["more bits for", "layers", "loss", "accuracy", "back", "weights kB"], rows, note)


def summary(start: Setting, best: Setting, unquantized: Answers, share: float, will_train: bool) -> str:
    """What the chosen layers bring and cost."""
    back = recovered(best, start, unquantized)
    short = "" if back >= share else f", short of the {share:.0%} asked for: no other layer alone costs more than noise"
    loss = f"loss {number(start.answers.loss)} -> {number(best.answers.loss)} (unquantized {number(unquantized.loss)})"
    accuracy = f"accuracy {start.answers.accuracy:.4f} -> {best.answers.accuracy:.4f} (unquantized {unquantized.accuracy:.4f})"
    weights = f"weights {start.bytes / 1000:.1f} kB -> {best.bytes / 1000:.1f} kB ({best.bytes / start.bytes - 1:+.1%})"
    layers = f"more bits for {len(best.layers)}: {', '.join(best.layers)}"
    return "\n".join([layers, f"{loss}, {back:.1%} back{short}", f"{accuracy}, {when(will_train)}", weights])


def header_of(config: dict[str, Any], start: Setting, best: Setting, unquantized: Answers, will_train: bool) -> str:
    """The comment lines that every recipe begins with."""
    losses = f"loss {number(start.answers.loss)} to {number(best.answers.loss)} (unquantized {number(unquantized.loss)})"
    return "\n".join(
        [
            f"# what: {config['recipe'] or 'a job'}, {len(best.layers)} layers at more bits",
            f"# why: they cost most of what quantization loses: {losses}, {when(will_train)}",
            f"# command: python train.py recipe={NAME}",
            "",
        ]
    )
