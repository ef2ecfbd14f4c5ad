"""What stands in front of the first step: importing the package, composing a recipe, preparing a network; and how fast pictures come."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.table import Table

import qat
from qat.choose import check_name
from qat.cli.command import OK, positive, print_wide
from qat.cli.compose import Composer
from qat.cli.environment import environment
from qat.cli.folders import PACKAGE
from qat.cli.recipes import find_recipes, runnable
from qat.cli.training_step import TrainingStep, build_network, picture_batch
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.seeds import job_data

# An own process each: nothing imported before, nothing cached in it.
COMMANDS = {
    "import torch": "import torch",
    "import torch, qat": "import torch, qat",
    "the same and the first use of every name": "import torch, qat; [getattr(qat, name) for name in qat.__all__]",
    "recipe table (python train.py)": "from qat.cli.train import main; main([])",
}


def add_start(commands: Any) -> argparse.ArgumentParser:
    """The subcommand and its options."""
    parser = commands.add_parser("start", help="time in front of the first step, and pictures a second", description=__doc__)
    parser.add_argument("--recipes", default="mbv1_bncorr", help="whose data modules are read, comma-separated (%(default)s)")
    parser.add_argument("--prepare", default="resnet50", help="network to prepare (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each (%(default)s)")
    parser.set_defaults(run=run_start)
    return parser


def run_start(arguments: argparse.Namespace) -> int:
    positive("--rounds", arguments.rounds)
    recipes = runnable(find_recipes())
    chosen = [check_name("--recipes", name, recipes) for name in arguments.recipes.split(",")]
    network = build_network(arguments.prepare)
    rows: list[dict[str, Any]] = [{"what": name, "seconds": round(_process(code, arguments.rounds), 3)} for name, code in COMMANDS.items()]
    x, _ = picture_batch(2, 224, "cpu")
    rows.append({"what": f"prepare {arguments.prepare}", "seconds": round(_timed(lambda: qat.prepare(network, (x,)), arguments.rounds), 3)})
    data = [pictures(name, arguments.rounds) for name in chosen]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("what")
    table.add_column("", justify="right")
    for row in rows:
        table.add_row(row["what"], f"{row['seconds']:.2f} s")
    for row in data:
        table.add_row(f"{row['recipe']}: pictures read", f"{row['read_per_second']:.0f} / s")
        table.add_row(f"{row['recipe']}: pictures trained", f"{row['trained_per_second']:.0f} / s")
    print_wide(table, 100)
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        words = ["start", *(f"--{key}={getattr(arguments, key)}" for key in ("recipes", "prepare", "rounds"))]
        command = " ".join(["python scripts/benchmark.py", *words])
        found = {"command": command, "environment": environment(words), "rows": rows, "data": data}
        (arguments.output / "start.json").write_text(json.dumps(found, indent=1) + "\n")
    return OK


def pictures(recipe: str, rounds: int) -> dict[str, Any]:
    """Pictures a second of a recipe's training loader, the first epoch (with its caches) left out, and of its training step."""
    with Composer(find_recipes()) as composer:
        config = composer.compose([f"recipe={recipe}"])
    data = job_data(config)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    batch = next(iter(loader))
    started, read = 0.0, 0
    for epoch in range(2):
        started, read = time.perf_counter(), 0
        for x, _ in loader:
            read += len(x)
            if epoch and time.perf_counter() - started > 20:
                break
    reading = time.perf_counter() - started
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, [batch[0]])
    step = TrainingStep(module.network.train(), *batch)
    step()
    training = _timed(step, rounds)
    return {"recipe": recipe, "read_per_second": round(read / reading, 1), "trained_per_second": round(len(batch[0]) / training, 1)}


def _process(code: str, rounds: int) -> float:
    def run() -> None:
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=PACKAGE.parent)

    run()
    return _timed(run, rounds)


def _timed(call: Any, rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
