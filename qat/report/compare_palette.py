"""One colour, dash and marker for each variant, the same in every picture.

Dashes and markers carry the difference where colours do not: in grey print.
"""

from collections.abc import Iterable
from typing import NamedTuple

from qat.report.colours import BLACK, BLUE, BROWN, GREEN, ORANGE, PURPLE, SKY, VERMILLION

ORDER = ("naive", "moving_average", "frozen", "batch_renorm", "bn_correction", "single_pass", "static", "scale_merge")
_COLOURS = (VERMILLION, ORANGE, BROWN, PURPLE, BLUE, SKY, GREEN, BLACK)
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1.2, 1.2), (7, 1.5, 1.2, 1.5))
_MARKERS = "osD^vP*X"


class Style(NamedTuple):
    """`dashes` are lengths of line and gap in points, () for a solid line."""

    colour: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> tuple[int, tuple[float, ...] | None]:
        """As matplotlib wants it."""
        return (0, self.dashes or None)


def in_order(names: Iterable[str]) -> list[str]:
    """The strategies in the order of the documents, each before its variations; others by name."""

    def place(name: str) -> tuple[int, str]:
        strategy = name.partition(",")[0]
        return (ORDER.index(strategy) if strategy in ORDER else len(ORDER), name)

    return sorted(names, key=place)


def styles(names: list[str]) -> dict[str, Style]:
    """A strategy has its own colour whatever it is compared with; other names share what is left, in their order."""
    taken = {ORDER.index(name) for name in names if name in ORDER}
    free = iter([i for i in range(len(ORDER)) if i not in taken] + list(range(len(ORDER), len(ORDER) + len(names))))
    found = {}
    for name in names:
        i = ORDER.index(name) if name in ORDER else next(free)
        place, round_ = i % len(_COLOURS), i // len(_COLOURS)
        found[name] = Style(_COLOURS[place], _DASHES[(place + round_) % len(_DASHES)], _MARKERS[(place + 3 * round_) % len(_MARKERS)])
    return found
