"""The layers to keep at more bits, measured together, and the recipe that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qat.bars import progress_bar, waiting
from qat.cli.recipe_of import Written, recipe_of
from qat.cli.recipes import find_recipes
from qat.graph.prepared import QuantGraph
from qat.graph.sensitivity import ALONE, OTHERS, layer_quantizers, readings
from qat.report.sensitivity import Cost
from qat.report.statistics import ONE_SIDED
from qat.report.tables import Table, number
from qat.train.answers import Answers, among, answers, change
from qat.train.finished_run import FinishedRun
from qat.train.more_bits import Rebuilder, Setting, fewest, rules_for, trains, weight_bytes, with_rules
from qat.whole_file import write_whole


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
    path: Path,
    network: str,
) -> Suggested:
    """Few layers that bring back `share` of what `shipped` loses against `unquantized`; the next one as `Search` says.

    Side effects: writes the recipe, whole or not at all.

    Args:
        shipped: the run's network, on the device of `rebuild`.
        costs: of all layers, those "alone" sorted, the largest first.
        path: of the recipe, which is called as its file is.
        network: what was measured, in words.
    """
    path.unlink(missing_ok=True)  # an earlier measurement's: this one may suggest nothing
    before = answers(shipped, batches, rebuild.device)
    gap = change(unquantized, before)
    if not gap.significant:
        hint = "; --before-training measures what its float network loses" if rebuild.trained else ""
        return Suggested(f"nothing to bring back: quantization costs {gap.value:+.4f}, standard error {gap.error:.4f}{hint}")
    search = Search(rebuild, batches, costs, rules_for(shipped, run.config["target"]["name"]))
    tried, best = fewest(search.next_layer, search.measure, before.loss - share * gap.value, before.loss)
    will_train = trains(run.config)
    start = Setting((), before, weight_bytes(shipped), "as it is")
    table = steps_table([start, *tried], unquantized, will_train) if tried else None
    if best is None or not change(best.answers, before).significant:
        return Suggested("more bits for single layers do not bring the loss down by more than noise: nothing written", table)
    said = summary(start, best, unquantized, share, will_train)
    chosen = {name: search.rules[name] for name in best.layers}
    written = recipe_of(with_rules(run.config, chosen), path.stem, find_recipes())
    header = header_of(run.config, path.stem, network, start, best, unquantized)
    write_whole(path, header + written.text)
    return Suggested(said, table, written)


class Search:
    """Which layer next: that without whose quantizers the network with more bits for those chosen so far loses least.

    It has to bring the loss down by more than noise, told as one of all layers not chosen yet; where none does, it is the layer that costs
    most alone, if that is more than noise.

    Args:
        costs: of the network with none chosen.
        rules: what more bits are, for each layer.
    """

    def __init__(self, rebuild: Rebuilder, batches: Sequence[tuple[Tensor, Tensor]], costs: list[Cost], rules: dict[str, dict[str, Any]]):
        self.rebuild, self.batches, self.rules = rebuild, batches, rules
        self._alone = [cost.layer for cost in costs if cost.setting == ALONE and cost.significant]
        self._first = {cost.layer: cost.change or 0.0 for cost in costs if cost.setting == OTHERS and cost.significant}
        self._last: tuple[tuple[str, ...], QuantGraph] | None = None

    def measure(self, layers: tuple[str, ...], step: str) -> Setting:
        """The whole network with more bits for these layers, built again."""
        with waiting(f"more bits for {len(layers)} layers: {step}"):
            network = self.rebuild(self._chosen(layers))
            self._last = (layers, network)
            return Setting(layers, answers(network, self.batches, self.rebuild.device), weight_bytes(network), step)

    def next_layer(self, layers: tuple[str, ...]) -> str | None:
        """The layer to add to those chosen; None where more bits for no other promise anything."""
        others = self._others(layers) if layers else self._first
        if others:
            return max(others, key=lambda name: others[name])
        return next((name for name in self._alone if name not in layers), None)

    def _chosen(self, layers: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        return {name: self.rules[name] for name in layers}

    def _others(self, layers: tuple[str, ...]) -> dict[str, float]:
        """What the loss comes down by when one more layer's quantizers are switched off, by layer; those where it is more than noise."""
        network = self.rebuild.plainly_rounded(self._chosen(layers))
        if network is None:
            network = self._last[1] if self._last is not None and self._last[0] == layers else self.rebuild(self._chosen(layers))
        left = [name for name in layer_quantizers(network) if name in self.rules and name not in layers]
        with progress_bar(shown=True) as bar:
            task = bar.add_task(f"looking for layer {len(layers) + 1}", total=2 + len(left))

            def read(toggled: nn.Module) -> Answers:
                bar.advance(task)
                return answers(toggled, self.batches, self.rebuild.device)

            found = readings(network, read, OTHERS, left)
        changes = {name: change(without, found.quantized) for name, without in found.others.items()}
        return {name: changes[name].value for name, p in among(changes).items() if p < ONE_SIDED}


def recovered(setting: Setting, start: Setting, unquantized: Answers) -> float:
    """Share of the loss that quantization costs which `setting` brings back."""
    return (start.answers.loss - setting.answers.loss) / (start.answers.loss - unquantized.loss)


def when(will_train: bool) -> str:
    return "before training with it" if will_train else "as a run with it ends, without training"


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
    short = "" if back >= share else f", short of the {share:.0%} asked for: no other single layer costs more than noise"
    loss = f"loss {number(start.answers.loss)} -> {number(best.answers.loss)} (unquantized {number(unquantized.loss)})"
    accuracy = f"accuracy {start.answers.accuracy:.4f} -> {best.answers.accuracy:.4f} (unquantized {unquantized.accuracy:.4f})"
    weights = f"weights {start.bytes / 1000:.1f} kB -> {best.bytes / 1000:.1f} kB ({best.bytes / start.bytes - 1:+.1%})"
    layers = f"more bits for {len(best.layers)}: {', '.join(best.layers)}"
    return "\n".join([layers, f"{loss}, {back:.1%} back{short}", f"{accuracy}, {when(will_train)}", weights])


def header_of(config: dict[str, Any], name: str, network: str, start: Setting, best: Setting, unquantized: Answers) -> str:
    """The comment lines that every recipe begins with."""
    losses = f"loss {number(start.answers.loss)} to {number(best.answers.loss)} (unquantized {number(unquantized.loss)})"
    return "\n".join(
        [
            f"# what: {config['recipe'] or 'a job'}, {len(best.layers)} layers at more bits",
            f"# why: they cost most of what quantization loses in {network}: {losses}, {when(trains(config))}",
            f"# command: python train.py recipe={name}",
            "",
        ]
    )
