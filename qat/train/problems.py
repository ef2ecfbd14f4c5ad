"""Collects what is wrong with a configuration, so that the user hears of all of it at once."""

from collections.abc import Collection

from qat.choose import check_name
from qat.errors import ConfigError


class NotPossibleError(ConfigError):
    """Values that each make sense, but not together: in a sweep that combination is left out."""


def not_possible(error: ConfigError) -> bool:
    """Is all that is wrong a combination of values, none of which is wrong by itself?"""
    return all(isinstance(part, NotPossibleError) for part in getattr(error, "problems", [error]))


class JointConfigError(ConfigError):
    """Several problems, a line each. The fields are those of the first."""

    def __init__(self, problems: list[ConfigError]):
        first = problems[0]
        super().__init__(first.where, first.found, first.expected, first.todo)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(map(str, self.problems))

    def __reduce__(self):
        return type(self), (self.problems,)


class Problems:
    """Checks add to it; `raise_any` ends the collection."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    def add(self, where: str, found: str, expected: str, todo: str, kind: type[ConfigError] = ConfigError) -> None:
        self.found.append(kind(where, found, expected, todo))

    def name(self, where: str, name: object, known: Collection[str], what: str | None = None) -> bool:
        """Is `name` one of `known`? Adds a problem with the closest match if it is not; `what` replaces the name in it."""
        try:
            check_name(where, name, known)
        except ConfigError as error:
            self.add(error.where, what or error.found, error.expected, error.todo)
            return False
        return True

    def number(self, where: str, value: object, low: float, high: float = float("inf"), *, whole: bool = False) -> bool:
        """Is `value` a number in [low, high]?"""
        kinds = int if whole else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high and value < float("inf"):
            return True
        kind = "a whole number" if whole else "a number"
        low_text, high_text = (f"{end:.0f}" if whole else f"{end:g}" for end in (low, high))
        span = f"{kind} from {low_text} to {high_text}" if high < float("inf") else f"{kind}, {low_text} or more"
        self.add(where, repr(value), span, f"Change {where}.")
        return False

    def raise_any(self) -> None:
        """
        Raises:
            ConfigError: there is at least one problem.
        """
        if self.found:
            raise self.found[0] if len(self.found) == 1 else JointConfigError(self.found)
