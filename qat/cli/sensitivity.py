"""Which layers quantization costs most in a finished run, and which to keep at more bits: `python scripts/sensitivity.py RUN_DIR`.

Writes sensitivity.csv and sensitivity.html and, where more bits for a few layers bring the loss back, the recipe more_bits.yaml; with
--before-training their names end in _before_training. docs/sensitivity.md says what the numbers mean.
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from qat.bars import progress_bar
from qat.choose import check_name
from qat.cli.command import OK, add_trust, guarded, positive, print_wide
from qat.cli.more_bits import Suggested, suggest
from qat.errors import ConfigError
from qat.graph.sensitivity import ALONE, OTHERS, Readings, layer_quantizers, readings
from qat.report.compare_files import check_writable
from qat.report.sensitivity import Cost, by_layer, cells, star, write_costs, write_page
from qat.report.tables import number
from qat.train.answers import Answers, among, answers, change
from qat.train.data import ImageData
from qat.train.finished_run import open_run
from qat.train.more_bits import Rebuilder, trains
from qat.train.trainer import evaluation_device

SPLITS = ("val", "test")
PICTURES = 512
TRAINED, BEFORE, UNTRAINED = "trained", "before training", "without training"
NETWORKS = {TRAINED: "the trained network", BEFORE: "the network before training", UNTRAINED: "the network of a run without training"}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 (bad input) or 130 (stopped by the user).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    return guarded(lambda: sensitivity(arguments))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", type=Path, help="folder of a finished run")
    parser.add_argument("--pictures", type=int, help=f"how many to measure on, 2 or more ({PICTURES}, or all of a smaller split)")
    parser.add_argument("--split", default="val", help="val or test (%(default)s); what is chosen on test is no longer measured by it")
    told = "of the loss that quantization costs, what more bits are to bring back (%(default)s); 0 suggests nothing"
    parser.add_argument("--share", type=float, default=0.9, help=told)
    told = "of a run that trained: measure the network it started training from, not the trained one"
    parser.add_argument("--before-training", action="store_true", help=told)
    told = "folder for the files (the run's); made where it is missing"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=told)
    add_trust(parser)
    return parser


def sensitivity(arguments: argparse.Namespace) -> int:
    """Raise what is wrong before any work, measure, suggest, write and print."""
    check_name("--split", arguments.split, SPLITS)
    if arguments.pictures is not None and positive("--pictures", arguments.pictures) < 2:
        raise ConfigError("--pictures", "1", "2 or more, whose differences say what is noise", f"Leave it out for {PICTURES}.")
    if not 0 <= arguments.share <= 1:
        raise ConfigError("--share", str(arguments.share), "a share from 0 to 1", "Leave it out for 0.9.")
    run = open_run(arguments.run, arguments.trust_model)
    data = run.data()
    batches = data.first_of(arguments.split, pictures_asked(arguments, data))
    device = evaluation_device(run.config["trainer"])
    shipped = run.network(data)
    rebuild = Rebuilder(run, data, shipped, device, arguments.before_training)
    if arguments.share:
        _ = rebuild.start  # refused here where it is gone, not after the layers are measured
    network = TRAINED if rebuild.trained else BEFORE if trains(run.config) else UNTRAINED
    places = Places(arguments.out or arguments.run, "_before_training" if network == BEFORE else "")
    places.check(with_recipe=bool(arguments.share))
    plain = rebuild.plainly_rounded({})
    if arguments.before_training and trains(run.config):
        shipped = rebuild({})
    measured = (shipped if plain is None else plain).to(device)
    grids = {name: "/".join(f"{q.spec.bits}" for q in own) for name, own in layer_quantizers(measured).items()}
    with progress_bar(shown=True) as bar:
        task = bar.add_task("measuring layers", total=2 + 2 * len(grids))

        def read(toggled: object) -> Answers:
            found = answers(measured, batches, device)
            bar.advance(task)
            return found

        found = readings(measured, read)
    shipped = shipped.to(device)
    costs = costs_of(found, grids, None if plain is None else answers(shipped, batches, device))
    told = f"{len(found.quantized.losses)} {arguments.split} pictures of {data.options['name']}, {NETWORKS[network]}"
    print_costs(arguments.run, told, costs)
    write_costs(places.csv, costs, network)
    title = f"{run.config['recipe'] or 'job'}: sensitivity{' before training' if network == BEFORE else ''}"
    subtitle = f"{arguments.run}: {told}"
    write_page(places.html, title, subtitle, costs, None)
    if arguments.share:
        suggested = suggest(run, rebuild, shipped, batches, costs, found.unquantized, arguments.share, places.recipe, NETWORKS[network])
        write_page(places.html, title, subtitle, costs, suggested.table)
        print_suggested(places.recipe, suggested)
    print(f"written: {places.csv}, {places.html}")
    return OK


@dataclass(frozen=True)
class Places:
    """Where the files go; networks that differ have names that differ."""

    folder: Path
    ending: str

    @property
    def csv(self) -> Path:
        return self.folder / f"sensitivity{self.ending}.csv"

    @property
    def html(self) -> Path:
        return self.folder / f"sensitivity{self.ending}.html"

    @property
    def recipe(self) -> Path:
        return self.folder / f"more_bits{self.ending}.yaml"

    def check(self, with_recipe: bool) -> None:
        """Make the folder.

        Raises:
            ConfigError: it cannot be made or written to, or a folder stands where a file goes.
        """
        check_writable(self.folder)
        for path in (self.csv, self.html, *([self.recipe] if with_recipe else [])):
            if path.is_dir():
                raise ConfigError(str(path), "a folder in the place of a file", "a file, or nothing", "Move it, or give --out FOLDER.")


def pictures_asked(arguments: argparse.Namespace, data: ImageData) -> int:
    """
    Raises:
        ConfigError: more than the split has, or a split of one picture.
    """
    held = len(getattr(data.splits, arguments.split).labels)
    asked = min(PICTURES, held) if arguments.pictures is None else arguments.pictures
    if not 2 <= asked <= held:
        expected = f"2 to {held}, as many as the {arguments.split} split has"
        raise ConfigError("--pictures", str(asked), expected, "Leave it out, or measure on the other --split.")
    return asked


def costs_of(found: Readings[Answers], grids: dict[str, str], shipped: Answers | None) -> list[Cost]:
    """The whole network, then the layers, the one that costs most alone first.

    Args:
        shipped: of the network with the post-training steps that the one measured has not; None where it is the one measured.
    """
    nothing, everything = found.unquantized, found.quantized
    whole = [("unquantized", nothing), ("quantized", everything), *([] if shipped is None else [("as shipped", shipped)])]
    costs = [Cost(setting, "", "", a.loss, a.accuracy) for setting, a in whole]
    alone = {name: change(nothing, a) for name, a in found.alone.items()}
    others = {name: change(a, everything) for name, a in found.others.items()}
    p_alone, p_others = among(alone), among(others)
    for name in sorted(alone, key=lambda name: -alone[name].value):
        for setting, read, by, p in (
            (ALONE, found.alone[name], alone[name], p_alone[name]),
            (OTHERS, found.others[name], others[name], p_others[name]),
        ):
            costs.append(Cost(setting, name, grids[name], read.loss, read.accuracy, by.value, by.error, p))
    return costs


def print_costs(folder: Path, told: str, costs: list[Cost]) -> None:
    """The table of layers, with what the whole network comes to above it."""
    print(f"{folder}: {told}")
    for cost in costs:
        if not cost.layer:
            print(f"{cost.setting:<12} loss {number(cost.loss):>8}   accuracy {cost.accuracy:.4f}")
    table = Table("layer", "bits", box=None, pad_edge=False, header_style="bold")
    for heading in ("alone", "s.e.", "", "accuracy", "others", "s.e.", "", "accuracy"):
        table.add_column(heading, justify="right")
    layers = by_layer(costs)
    for layer, alone, others in layers:
        table.add_row(layer, alone.grids, *cells(alone), *cells(others))
    print_wide(table, 160)
    print("alone: loss with this layer alone quantized, against nothing; others: with everything, against all but this layer")
    print(star(len(layers)))


def print_suggested(path: Path, suggested: Suggested) -> None:
    """What was tried and what came out, in words and as a recipe, which is at `path`."""
    if suggested.table is not None:
        table = Table(*suggested.table.columns, box=None, pad_edge=False, header_style="bold")
        for row in suggested.table.rows:
            table.add_row(*map(str, row))
        print_wide(table, 160)
        print(suggested.table.note)
    print(suggested.said)
    if suggested.written is not None:
        print(f"written: {path}; cp {shlex.quote(str(path))} recipes/ && python train.py recipe={path.stem}")
        if suggested.written.command:
            print(f"the same: {suggested.written.command}")
