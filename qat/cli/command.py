"""What every command does alike: its exit status; bad input is one line on stderr."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console

from qat.errors import ConfigError, QATError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def positive(where: str, value: str | int) -> int:
    """`value` as a whole number.

    Raises:
        ConfigError: no whole number from 1 on.
    """
    if not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(where, repr(value), "a whole number from 1 on", f"Write {where} 1.")
    return int(value)


def add_trust(parser: argparse.ArgumentParser) -> None:
    """The option that goes to `qat.train.recorded`."""
    told = "the run's model.name, where it is a function of yours that is not defined in the working directory"
    parser.add_argument("--trust-model", metavar="NAME", help=told)


def print_wide(table: Any, width: int) -> None:
    """Print a table; where there is no terminal, whose width it would have to keep to, in `width` columns."""
    console = Console()
    (console if console.is_terminal else Console(width=width)).print(table)


def guarded(run: Callable[[], int]) -> int:
    """Exit status of `run`, or that of the error it ended with."""
    try:
        return run()
    except QATError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
