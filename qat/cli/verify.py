"""Prove that a run's file computes what was trained: `python scripts/verify.py RUN_DIR`.

Against integers alone, and against the network in training, every tensor is computed from the integers before it: in a deep network a
single sum half-way between two codes, that goes the other way, would grow.
"""

import argparse
import math
from itertools import islice
from pathlib import Path

from rich.table import Table

import qat
from qat.cli.command import FAILED, OK, add_trust, guarded, positive, print_wide
from qat.deploy.reference import MULTIPLIERS
from qat.deploy.runtime import RUNTIMES, predict
from qat.deploy.targets import check_target
from qat.deploy.verify import ParityReport, signal_to_noise, verify_integers, verify_trained
from qat.errors import ConfigError
from qat.train.finished_run import open_run

_INTEGERS = {f"integers_{name}": f"integers alone, {what}" for name, what in MULTIPLIERS.items()}
_TRAINED = {"trained": "the network in training, in evaluation mode"}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (above the bound) or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    return guarded(lambda: verify_run(arguments))


def argument_parser() -> argparse.ArgumentParser:
    known = "; ".join(f"{name}: {what}" for name, what in {**RUNTIMES, **_INTEGERS, **_TRAINED}.items())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="folder of a finished run")
    parser.add_argument("--against", default="onnxruntime", choices=[*RUNTIMES, *_INTEGERS, *_TRAINED], help=known)
    parser.add_argument("--pictures", type=int, default=256, help="test pictures to compare on, rounded up to batches of 32 (%(default)s)")
    parser.add_argument("--file", type=Path, help="another file of the same run, as scripts/export.py writes them (RUN_DIR/model.onnx)")
    parser.add_argument("--stepwise", action="store_true", help="compute each tensor from convert()'s integers before it (onnxruntime)")
    parser.add_argument("--max-lsb", type=int, default=1, help="largest difference allowed (%(default)s)")
    parser.add_argument("--identical", type=float, default=0.999, help="least share of identical integers (%(default)s)")
    add_trust(parser)
    return parser


def verify_run(arguments: argparse.Namespace) -> int:
    positive("--pictures", arguments.pictures)
    if arguments.max_lsb < 0 or not 0 <= arguments.identical <= 1:
        found = f"--max-lsb {arguments.max_lsb} --identical {arguments.identical}"
        raise ConfigError("bounds", found, "LSB from 0 on, a share from 0 to 1", "Leave them out for 1 and 0.999.")
    run = open_run(arguments.run, arguments.trust_model)
    data = run.data(eval_batch_size=32)
    pictures = [images for images, _ in islice(data.test_dataloader(), math.ceil(arguments.pictures / 32))]
    network = run.network(data)
    converted = qat.convert(network)
    file = arguments.file or run.onnx
    if arguments.against == "openvino":
        check_target(converted, "openvino")
    if arguments.against in _INTEGERS:
        report = verify_integers(converted, pictures, arguments.against.removeprefix("integers_"), stepwise=True)
    elif arguments.against in _TRAINED:
        report = verify_trained(network, converted, pictures, stepwise=True)
    else:
        report = qat.verify(converted, file, pictures, arguments.against, arguments.stepwise)
        answers = zip(predict(file, pictures, arguments.against), pictures)
        agreeing = sum(int((logits.argmax(1) == converted(images).argmax(1)).sum()) for logits, images in answers)
        print(f"the same answer as convert() for {agreeing} of {sum(map(len, pictures))} pictures")
    print_report(report, signal_to_noise(network, converted, pictures))
    first = next((row for row in report.tensors if row.max_lsb > arguments.max_lsb or row.identical < arguments.identical), None)
    told = f"{arguments.against} against convert() on {sum(map(len, pictures))} test pictures"
    if first is None:
        least = min(row.identical for row in report.tensors)
        bounds = f"bounds {arguments.max_lsb} LSB, {arguments.identical:.4%}"
        print(f"{told}: at most {report.max_lsb} LSB, at least {least:.4%} identical at every tensor ({bounds})")
        return OK
    print(f"{told}: first diverges at {first.name}: {first.max_lsb} LSB, {first.identical:.4%} identical")
    return FAILED


def print_report(report: ParityReport, decibels: dict[str, float]) -> None:
    """A row for each activation tensor in graph order; SQNR against the float network."""
    table = Table("tensor", box=None, pad_edge=False, header_style="bold")
    for heading in ("identical", "LSB", "SQNR dB"):
        table.add_column(heading, justify="right")
    for row in report.tensors:
        table.add_row(row.name, f"{row.identical:.6f}", str(row.max_lsb), f"{decibels[row.name]:.1f}" if row.name in decibels else "-")
    table.add_row("all", f"{report.identical:.6f}", str(report.max_lsb), "")
    print_wide(table, 160)
