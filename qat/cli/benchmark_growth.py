"""How the time of a training step grows with depth, width, resolution and batch.

An exponent e says that the time grows as the e-th power: of the number beside the axis' name, and of the float network's own step. The
second is 1 where quantization costs the same share at every size.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torchvision
from rich.table import Table
from torch import nn

import qat
from qat.choose import check_name
from qat.cli.command import OK, positive, print_wide
from qat.cli.environment import environment
from qat.cli.training_step import CLASSES, TrainingStep, build_network, check_device, picture_batch
from qat.cli.training_variants import FLOAT, our_variants
from qat.deploy.latency import Spread, interleaved, ratio


@dataclass(frozen=True)
class Point:
    """One size: its network, pictures, and the number that the time is to grow with."""

    label: str
    number: float
    build: Callable[[], nn.Module]
    batch: int = 16
    size: int = 32


def _layers(name: str) -> int:
    return sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in build_network(name).modules())


def _mobilenet(width: float) -> nn.Module:
    return torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=width)


def _resnet18() -> nn.Module:
    return build_network("resnet18")


AXES: dict[str, Callable[[], list[Point]]] = {
    "depth (layers)": lambda: [
        Point(name, _layers(name), partial(build_network, name)) for name in ("resnet18", "resnet34", "resnet50", "resnet101")
    ],
    "width (of mobilenet_v2)": lambda: [Point(f"{w}", w, partial(_mobilenet, w), 32) for w in (0.25, 0.5, 0.75, 1.0, 1.4)],
    "resolution (pixels)": lambda: [Point(f"{side}", side * side, _resnet18, 4, side) for side in (32, 64, 96, 128, 160, 224)],
    "batch (pictures)": lambda: [Point(f"{batch}", batch, _resnet18, batch) for batch in (8, 16, 32, 64, 128)],
}


def add_growth(commands: Any) -> argparse.ArgumentParser:
    """The subcommand and its options."""
    parser = commands.add_parser("growth", help="training step over depth, width, resolution and batch", description=__doc__)
    parser.add_argument("--axes", default=",".join(name.split()[0] for name in AXES), help="comma-separated (%(default)s)")
    parser.add_argument("--strategies", default="static,bn_correction", help="comma-separated (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.set_defaults(run=run_growth)
    return parser


def run_growth(arguments: argparse.Namespace) -> int:
    strategies = [check_name("--strategies", name, qat.STRATEGIES) for name in arguments.strategies.split(",")]
    axes = {name.split()[0]: name for name in AXES}
    chosen = [axes[check_name("--axes", name, axes)] for name in arguments.axes.split(",")]
    for key in ("rounds", "threads"):
        positive(f"--{key}", getattr(arguments, key))
    check_device(arguments.device)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for axis in chosen:
        measured = [row for point in AXES[axis]() for row in measure(axis, point, strategies, arguments)]
        print_rows(measured, exponents(measured))
        rows += measured
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        words = ["growth", *(f"--{key}={getattr(arguments, key)}" for key in ("axes", "strategies", "rounds", "threads", "device"))]
        command = " ".join(["python scripts/benchmark.py", *words])
        found = {"command": command, "environment": environment(words), "exponents": exponents(rows), "rows": rows}
        (arguments.output / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    return OK


def measure(axis: str, point: Point, strategies: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the float network and for each strategy."""
    torch.manual_seed(0)
    x, labels = picture_batch(point.batch, point.size, arguments.device)
    builders = our_variants(point.build().train().to(arguments.device), x, strategies)
    steps = {key: TrainingStep(builders[key]().network, x, labels) for key in (FLOAT, *strategies)}
    seconds = interleaved(steps, arguments.rounds)
    rows = []
    for key, measured in seconds.items():
        against = ratio(measured, seconds[FLOAT])
        rows.append(
            {
                "axis": axis,
                "point": point.label,
                "number": point.number,
                "variant": key,
                "ms_median": round(1000 * Spread.of(measured).median, 3),
                **{f"ratio_{end}": round(value, 4) for end, value in vars(against).items()},
            }
        )
    return rows


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every axis and variant: the slope of log time over the log of the axis' number, and over that of the float network's time."""
    found = []
    for axis, variant in dict.fromkeys((row["axis"], row["variant"]) for row in rows):
        own = [row for row in rows if (row["axis"], row["variant"]) == (axis, variant)]
        base = [row for row in rows if (row["axis"], row["variant"]) == (axis, FLOAT)]
        if len(own) < 2:
            continue
        time = [row["ms_median"] for row in own]
        slope, against = (_slope(over, time) for over in ([row["number"] for row in own], [row["ms_median"] for row in base]))
        found.append({"axis": axis, "variant": variant, "exponent": slope, "exponent_of_float_time": against})
    return found


def _slope(over: list[float], values: list[float]) -> float:
    return round(float(np.polyfit(np.log(over), np.log(values), 1)[0]), 3)


def print_rows(rows: list[dict[str, Any]], fitted: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("axis", "size", "variant"):
        table.add_column(heading)
    for heading in ("ms", "times float", "quartiles"):
        table.add_column(heading, justify="right")
    for row in rows:
        spread = f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}"
        table.add_row(row["axis"], row["point"], row["variant"], f"{row['ms_median']:.1f}", f"{row['ratio_median']:.3f}", spread)
    print_wide(table, 120)
    for row in fitted:
        print(f"{row['axis']}, {row['variant']}: exponent {row['exponent']:.2f}, of the float step {row['exponent_of_float_time']:.2f}")
