"""A comparison in sentences, and its numbers as text."""

from collections import Counter

from qat.report.compare_cells import Cells
from qat.report.compare_names import text
from qat.report.compare_numbers import BASELINE, BETTER, NO_DIFFERENCE, NOT_TESTED, WORSE, Row
from qat.report.compare_runs import LeftOut, Run
from qat.report.statistics import Estimate

_KINDS = {
    "failed": "failed",
    "interrupted": "interrupted",
    "unfinished": "without a result yet",
    "tuning": "run to choose values by (tuning)",
    "duplicate": "replaced by a newer run of the same cell and seed",
    "unreadable": "not readable as a run",
}


_CORRECTED = "p < 0.05 after Holm's correction within each setting"


def number(value: float, signed: bool = False) -> str:
    """Four decimals, with a true minus where signed."""
    return f"{value:+.4f}".replace("-", "−") if signed else f"{value:.4f}"


def shown(found: Estimate | None, signed: bool = False) -> str:
    """mean ± half width; the mean alone of one seed, and (equal) behind it where several gave the same."""
    return "–" if found is None else number(found.mean, signed) + half_text(found)


def half_text(found: Estimate) -> str:
    """What stands behind a mean."""
    return " (equal)" if found.equal else "" if found.half is None else f" ± {found.half:.4f}"


def p_text(p: float | None) -> str:
    return "–" if p is None else "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def listed(names: list[str]) -> str:
    """a, b and c."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def count(n: int, what: str) -> str:
    """1 run, 2 runs."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def size(cells: Cells) -> str:
    """8 strategies in 4 settings."""
    n, settings = len(cells.variants), count(len(cells.settings), "setting")
    if cells.by != ["fold.name"]:
        return f"{count(n, 'value')} of {listed(cells.by)} in {settings}"
    return f"{n} {'strategy' if n == 1 else 'strategies'} in {settings}"


def compared(cells: Cells, runs: list[Run]) -> str:
    """What was compared, in one sentence."""
    seeds = sorted({seed for cell in cells.cells for seed in cell.runs})
    sizes = Counter(len(cell.runs) for cell in cells.cells)
    told = f"{size(cells)}: {count(sum(len(c.runs) for c in cells.cells), 'run')}"
    each = f"{next(iter(sizes))} in each cell" if len(sizes) == 1 else f"{min(sizes)} to {max(sizes)} in a cell"
    named = ", ".join(map(str, seeds)) if len(seeds) <= 12 else f"{seeds[0]} to {seeds[-1]}"
    return f"{told} of {count(len(seeds), 'seed')} ({named}), {each}."


def left_out(left: list[LeftOut]) -> list[str]:
    """A sentence for each kind of folder that is not compared."""
    counts = Counter(item.kind for item in left)
    return [f"{count(counts[kind], 'folder')} left out: {words}." for kind, words in _KINDS.items() if counts[kind]]


def damaged(runs: list[Run]) -> list[str]:
    """A sentence for each kind of file that cannot be drawn."""
    counts = Counter(name for run in runs for name in run.damaged)
    examples = {name: next(run.folder for run in runs if name in run.damaged) for name in counts}
    others = {name: f" and {count(n - 1, 'other')}" if n > 1 else "" for name, n in counts.items()}
    return [f"Damaged, and not drawn: {name} of {examples[name]}{others[name]}." for name in counts]


def findings(rows: list[Row], cells: Cells, baseline: str | None) -> list[str]:
    """What is significant, setting by setting, and what is not."""
    if len(cells.variants) == 1:
        return ["One variant alone: there is nothing to compare it with."]
    if baseline is None:
        return []
    told = [_of_setting([row for row in rows if row.cell.setting == setting], setting, baseline) for setting in cells.settings]
    alone = [name for name in cells.settings if (own := cells.of(name)) and baseline not in [cell.variant for cell in own]]
    if alone:
        more = f"; and {count(len(alone) - 3, 'more setting')}" if len(alone) > 3 else ""
        told.append(f"No finished run of {baseline}, so nothing is compared: {'; '.join(alone[:3])}{more}.")
    verdicts = Counter(row.verdict for row in rows if row.verdict != BASELINE)
    found, tested = verdicts[BETTER] + verdicts[WORSE], sum(verdicts.values()) - verdicts[NOT_TESTED]
    show = "shows" if found == 1 else "show"
    head = f"{found} of {count(tested, 'comparison')} with {baseline} {show} a significant difference ({_CORRECTED})."
    if not tested:
        head = f"Nothing could be tested against {baseline}: a test needs two seeds that both have."
    elif not found:
        head = f"No significant difference to {baseline} in {count(tested, 'comparison')} ({_CORRECTED})."
    return [head, *[words for words in told if words]]


def _of_setting(rows: list[Row], setting: str, baseline: str) -> str:
    others = [row for row in rows if row.verdict != BASELINE]
    if not others or len(others) == len(rows):
        return ""
    parts = []
    for verdict in (BETTER, WORSE):
        named = [f"{row.cell.variant} ({_evidence(row)})" for row in others if row.verdict == verdict]
        if named:
            parts.append(f"{verdict} than {baseline}: {listed(named)}")
    if alike := [row.cell.variant for row in others if row.verdict == NO_DIFFERENCE]:
        parts.append(f"{NO_DIFFERENCE}: {listed(alike)}")
    untested = Counter(row.why for row in others if row.verdict == NOT_TESTED)
    for why in untested:
        parts.append(f"{NOT_TESTED} ({why}): {listed([row.cell.variant for row in others if row.why == why])}")
    return f"{setting}: " + "; ".join(parts) + "."


def _evidence(row: Row) -> str:
    assert row.to_baseline is not None and row.to_baseline.difference is not None
    found = row.to_baseline.difference
    assert found.low is not None and found.high is not None  # what has a p value has an interval
    interval = f"{number(found.low, True)} to {number(found.high, True)}"
    return f"{number(found.mean, True)}, 95 % interval {interval}, p = {p_text(row.p)}, {count(found.n, 'seed')}"


def followers(cells: Cells) -> list[str]:
    """Keys that have one value for each variant, wherever it runs: a sentence each. The others are columns of the table."""
    told = []
    for key in cells.details:
        values = {name: {cell.keys[key] for cell in cells.cells if cell.variant == name} for name in cells.variants}
        if all(len(own) == 1 for own in values.values()):
            groups: dict[str, list[str]] = {}
            for name, own in values.items():
                groups.setdefault(text(next(iter(own))), []).append(name)
            told.append(f"{key}: " + "; ".join(f"{value} for {listed(names)}" for value, names in groups.items()) + ".")
    return told


def columns(cells: Cells) -> list[str]:
    """Details that differ between the cells of one variant, such as a learning rate tuned for each."""
    return [
        key
        for key in cells.details
        if any(len({cell.keys[key] for cell in cells.cells if cell.variant == name}) > 1 for name in cells.variants)
    ]
