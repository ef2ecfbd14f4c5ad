"""Time and memory of a training step: every fold strategy and phase against the float network, and against other libraries.

Each variant takes turns with the float network in one process, so that what else the machine does meets both alike. A ratio is that of
neighbouring measurements.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

import qat
from qat.choose import check_name
from qat.cli.command import OK, positive, print_wide
from qat.cli.environment import environment, installed
from qat.cli.training_step import TrainingStep, build_network, check_device, peak_memory, picture_batch
from qat.cli.training_variants import FLOAT, PEERS, Variant, build_peer, our_variants
from qat.deploy.latency import Spread, interleaved, ratio
from qat.report.plots import ratio_bars

LIBRARIES = {"torch.ao FX": "torch", "torchao PT2E": "torchao", "brevitas": "brevitas", "aimet-torch": "aimet-torch"}


def add_train(commands: Any) -> argparse.ArgumentParser:
    """The subcommand and its options."""
    parser = commands.add_parser("train", help="training step of every fold strategy, and of other libraries", description=__doc__)
    parser.add_argument("--models", default="resnet18,mobilenet_v2", help="of torchvision or timm, comma-separated (%(default)s)")
    parser.add_argument("--strategies", default=",".join(qat.STRATEGIES), help="comma-separated (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="pictures at a time (%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="height and width of the pictures (%(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="torch.compile every network")
    parser.add_argument("--peers", action="store_true", help="also " + ", ".join(PEERS) + ", where they are installed")
    parser.set_defaults(run=run_train)
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    strategies = [check_name("--strategies", name, qat.STRATEGIES) for name in arguments.strategies.split(",")]
    for key in ("size", "rounds", "threads", "batch"):
        positive(f"--{key}", getattr(arguments, key))
    check_device(arguments.device)
    models = arguments.models.split(",")
    for name in models:
        build_network(name)
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    skipped: dict[str, dict[str, str]] = {}
    for name in models:
        measured, skipped[name] = measure(name, strategies, arguments)
        print_rows(measured, skipped[name])
        rows += measured
    if arguments.output:
        write(arguments, rows, skipped)
    return OK


def measure(name: str, strategies: list[str], arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each variant of a network, and why others have none."""
    torch.manual_seed(0)
    x, labels = picture_batch(arguments.batch, arguments.size, arguments.device)
    model = build_network(name).train().to(arguments.device)
    base = TrainingStep(_compiled(copy.deepcopy(model), arguments), x, labels)
    base_memory = peak_memory(base)
    builders: dict[str, Callable[[], Variant | str]] = {**our_variants(model, x, strategies)}
    builders |= {peer: partial(build_peer, peer, model, x) for peer in PEERS if arguments.peers}
    rows, skipped = [], {}
    for key, build in builders.items():
        variant = build()
        if isinstance(variant, str):
            skipped[key] = variant
            continue
        step = TrainingStep(_compiled(variant.network, arguments), x, labels)
        seconds = interleaved({FLOAT: base, key: step}, arguments.rounds)
        memory = base_memory if key == FLOAT else peak_memory(step)
        rows.append(
            {
                "model": name,
                "batch": arguments.batch,
                "runtime": "compiled" if arguments.compile else "eager",
                "variant": key,
                **{f"ms_{end}": round(1000 * value, 3) for end, value in vars(Spread.of(seconds[key])).items()},
                **{f"ratio_{end}": round(value, 4) for end, value in vars(ratio(seconds[key], seconds[FLOAT])).items()},
                "memory_mb": round(memory / 1e6, 1),
                "memory_ratio": round(memory / base_memory, 3),
                "weight_quantizers": variant.weights,
                "activation_quantizers": variant.activations,
            }
        )
    return rows, skipped


def _compiled(network: nn.Module, arguments: argparse.Namespace) -> nn.Module:
    return torch.compile(network) if arguments.compile else network  # type: ignore[return-value]


def print_rows(rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "variant"):
        table.add_column(heading)
    for heading in ("ms", "times float", "quartiles", "memory, MB", "times float", "quantizers"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["variant"],
            f"{row['ms_median']:.1f}",
            f"{row['ratio_median']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
            f"{row['memory_mb']:.0f}",
            f"{row['memory_ratio']:.2f}",
            f"{row['weight_quantizers']} + {row['activation_quantizers']}",
        )
    print_wide(table, 140)
    for name, reason in skipped.items():
        print(f"{name}: not measured, {reason}")


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]], skipped: dict[str, dict[str, str]]) -> None:
    """training.json and training.svg in the output folder."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    keys = ("models", "strategies", "batch", "size", "rounds", "threads", "device")
    words = ["train", *(f"--{key}={getattr(arguments, key)}" for key in keys)]
    words += [f"--{key}" for key in ("compile", "peers") if getattr(arguments, key)]
    libraries = {name: installed(package) for name, package in LIBRARIES.items()} if arguments.peers else {}
    found = {
        "command": " ".join(["python scripts/benchmark.py", *words]),
        "environment": environment(words),
        "peers": libraries,
        "skipped": skipped,
        "rows": rows,
    }
    (arguments.output / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.output / "training.svg").write_text(ratio_bars(rows, "time of a training step, float network = 1"))
