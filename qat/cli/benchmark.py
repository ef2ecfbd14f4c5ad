"""Speed, measured side by side in one process: `python scripts/benchmark.py infer`."""

import argparse
from pathlib import Path

from qat.cli.benchmark_infer import add_infer
from qat.cli.command import guarded


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_infer(commands).add_argument("--output", type=Path, help="folder for the JSON file and the plot (printed only)")
    arguments = parser.parse_args(argv)
    return guarded(lambda: arguments.run(arguments))
