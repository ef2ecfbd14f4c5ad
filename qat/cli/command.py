"""What every command does alike: its exit status; bad input is one line on stderr."""

import sys
from collections.abc import Callable

from qat.errors import QATError

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def guarded(run: Callable[[], int]) -> int:
    """Exit status of `run`, or that of the error it ended with."""
    try:
        return run()
    except QATError as error:
        print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
