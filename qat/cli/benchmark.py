"""Speed, measured side by side in one process: `python scripts/benchmark.py infer | train | growth | start | profile`."""

import argparse
from pathlib import Path

from qat.cli.benchmark_growth import add_growth
from qat.cli.benchmark_infer import add_infer
from qat.cli.benchmark_profile import add_profile
from qat.cli.benchmark_start import add_start
from qat.cli.benchmark_train import add_train
from qat.cli.command import guarded


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for parser_of in (add_infer, add_train, add_growth, add_start, add_profile):
        parser_of(commands).add_argument("--output", type=Path, help="folder for what is found (printed only)")
    arguments = parser.parse_args(argv)
    return guarded(lambda: arguments.run(arguments))
