"""What a person sees of work that takes seconds: on standard error, where that is a terminal."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track

Item = TypeVar("Item")


def bar(items: Sequence[Item], what: str) -> Iterable[Item]:
    """The items, with a bar that counts them."""
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)


def progress_bar(shown: bool) -> Progress:
    """A bar whose tasks are added by whoever works."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner beside `what`, as long as the work inside takes."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield
