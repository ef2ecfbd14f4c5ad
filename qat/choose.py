"""Look a name from a recipe up, and offer the closest match when it is unknown."""

from collections.abc import Collection
from difflib import get_close_matches

from qat.errors import ConfigError

_LISTED = 12  # a longer list of names hides the hint


def check_name(where: str, name: object, known: Collection[str]) -> str:
    """The name itself, when it is one of `known`.

    Raises:
        ConfigError: unknown name; lists the closest matches, and all names when they are few.
    """
    if isinstance(name, str) and name in known:
        return name
    close = get_close_matches(str(name), known, n=3)
    expected = "one of " + ", ".join(sorted(known)) if len(known) <= _LISTED else f"one of {len(known)} known names"
    todo = f"Did you mean {' or '.join(repr(c) for c in close)}?" if close else "Check the spelling."
    raise ConfigError(where, repr(name), expected, todo)
