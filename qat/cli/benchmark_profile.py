"""Where the time of a training step goes: a chrome trace and the operators that take most, for the float network and each strategy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import qat
from qat.choose import check_name
from qat.cli.command import OK, positive, print_wide
from qat.cli.training_step import TrainingStep, build_network, check_device, picture_batch
from qat.cli.training_variants import our_variants

STEPS = 3


def add_profile(commands: Any) -> argparse.ArgumentParser:
    """The subcommand and its options."""
    parser = commands.add_parser("profile", help="chrome trace and top operators of a training step", description=__doc__)
    parser.add_argument("--models", default="resnet18", help="of torchvision or timm, comma-separated (%(default)s)")
    parser.add_argument("--strategies", default="bn_correction", help="comma-separated (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="pictures at a time (%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="height and width of the pictures (%(default)s)")
    parser.add_argument("--rows", type=int, default=15, help="operators listed (%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.set_defaults(run=run_profile)
    return parser


def run_profile(arguments: argparse.Namespace) -> int:
    strategies = [check_name("--strategies", name, qat.STRATEGIES) for name in arguments.strategies.split(",")]
    for key in ("batch", "size", "rows"):
        positive(f"--{key}", getattr(arguments, key))
    check_device(arguments.device)
    x, labels = picture_batch(arguments.batch, arguments.size, arguments.device)
    for model in arguments.models.split(","):
        network = build_network(model).train().to(arguments.device)
        for name, build in our_variants(network, x, strategies).items():
            step = TrainingStep(build().network, x, labels)
            step()
            with torch.profiler.profile() as profile:
                for _ in range(STEPS):
                    step()
            print_operators(f"{model}, {name}", profile, arguments.rows, arguments.device)
            if arguments.output:
                arguments.output.mkdir(parents=True, exist_ok=True)
                profile.export_chrome_trace(str(trace_path(arguments.output, model, name)))
    return OK


def trace_path(folder: Path, model: str, variant: str) -> Path:
    return folder / f"{model}_{variant.replace(', ', '_').replace(' ', '_')}.json"


def print_operators(title: str, profile: Any, rows: int, device: str) -> None:
    key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = sorted(profile.key_averages(), key=lambda event: -getattr(event, key))
    total = sum(getattr(event, key) for event in events)
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column("operator")
    for heading in ("ms a step", "share", "calls a step"):
        table.add_column(heading, justify="right")
    for event in events[:rows]:
        own = getattr(event, key)
        table.add_row(event.key, f"{own / 1000 / STEPS:.2f}", f"{own / total:.1%}", f"{event.count / STEPS:.0f}")
    print_wide(table, 120)
