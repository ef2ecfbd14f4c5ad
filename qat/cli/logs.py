"""Log of a run: on standard output as it comes, in train.log with times and tracebacks."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE_ONLY = {"extra": {"file_only": True}}  # keyword arguments of a log call whose text is for train.log alone


class _StandardOutput(logging.StreamHandler):
    """Follows sys.stdout: progress bars and tests replace it for a while."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.addFilter(lambda record: not getattr(record, "file_only", False))

    @property
    def stream(self) -> Any:  # type: ignore[override]
        return sys.stdout

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return f"{record.levelname.lower()}: {text}" if record.levelno >= logging.WARNING else text


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """Inside, the log goes to folder/train.log (appended) and standard output, Python's warnings too."""
    file = logging.FileHandler(folder / "train.log", encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root, own = logging.getLogger(), logging.getLogger("qat")
    handlers, level = [file, _StandardOutput()], own.level
    for handler in handlers:
        root.addHandler(handler)
    own.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        own.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
        file.close()
