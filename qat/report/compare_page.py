"""compare.html: one file that needs nothing else. Words first, then the table, then the pictures."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from qat.report.compare_facts import commands, facts, usual
from qat.report.compare_numbers import BEST, LIKE_BEST, UNKNOWN, Row, mean_ranks
from qat.report.compare_palette import styles
from qat.report.compare_plots import swatch
from qat.report.compare_sections import sections
from qat.report.compare_words import columns, compared, damaged, findings, followers, half_text, left_out, number, p_text, shown, size, text
from qat.report.comparison import Comparison

MARKS = {LIKE_BEST: "≈", UNKNOWN: "?"}
_WIDEST = 6  # settings side by side; more are rows


def page_of(found: Comparison) -> str:
    """The whole page. Text is escaped."""
    look = styles(found.cells.variants)
    environment = Environment(loader=PackageLoader("qat.report", "."), autoescape=True, undefined=StrictUndefined)
    drawn, missing = sections(found, look)
    told = findings(found.rows, found.cells, found.baseline)
    return environment.get_template("compare.html.j2").render(
        title=f"Comparison: {size(found.cells)}",
        compared=compared(found.cells, found.runs),
        facts=facts(found),
        usual=usual(found),
        followers=followers(found.cells),
        left_out=left_out(found.left),
        damaged=damaged(found.runs),
        left=sorted(found.left, key=lambda item: (item.kind, str(item.folder))),
        findings=told,
        baseline=found.baseline,
        matrix=matrix(found),
        heads=heads(found),
        details=columns(found.cells),
        settings=[(setting, [cell_line(row, columns(found.cells)) for row in found.rows_at(setting)]) for setting in found.cells.settings],
        commands=commands(found),
        legend=[(name, Markup(swatch(style))) for name, style in look.items()],
        sections=drawn,
        missing=missing,
    )


def heads(found: Comparison) -> list[str]:
    return ["", "n", "accuracy", "− float", f"− {found.baseline or 'baseline'}", "p (Holm)", "found", "s/step", "MB", *columns(found.cells)]


def cell_line(row: Row, details: list[str]) -> list[str]:
    """The texts of a row of the table of cells, in the order of `heads`."""
    difference = row.to_baseline.difference if row.to_baseline else None
    note = f" ({row.simulated} fake-quantized)" if row.simulated else ""
    pairs = f" ({difference.n} common)" if difference and difference.n != row.accuracy.n else ""
    return [
        row.cell.variant,
        str(row.accuracy.n),
        shown(row.accuracy) + note,
        shown(row.to_float, True),
        shown(difference, True) + pairs,
        p_text(row.p),
        row.verdict + (f": {row.why}" if row.why else ""),
        "–" if row.seconds_per_step is None else f"{row.seconds_per_step:.3f}",
        "–" if row.memory is None else f"{row.memory:.0f}",
        *(text(row.cell.keys[key]) for key in details),
    ]


def matrix(found: Comparison) -> dict[str, Any]:
    """Variants by settings, or settings by variants where there are many settings: {"columns", "rows": [(name, entries)]}.

    An entry is None or {"mean", "half", "best", "mark"}.
    """
    entries = {(row.cell.variant, row.cell.setting): _entry(row) for row in found.rows}
    cells, ranks = found.cells, mean_ranks(found.rows, found.cells) if len(found.cells.settings) > 1 else {}
    if len(cells.settings) > _WIDEST:
        rows = [(setting, [entries.get((name, setting)) for name in cells.variants], None) for setting in cells.settings]
        return {
            "columns": cells.variants,
            "rows": rows,
            "ranks": None,
            "rank_row": [_rank(ranks, name) for name in cells.variants] if ranks else None,
        }
    lines = [(name, [entries.get((name, setting)) for setting in cells.settings], _rank(ranks, name)) for name in cells.variants]
    return {"columns": cells.settings, "rows": lines, "ranks": bool(ranks) and len(cells.variants) > 1, "rank_row": None}


def _rank(ranks: dict[str, float], name: str) -> str | None:
    return f"{ranks[name]:.2f}" if name in ranks else None


def _entry(row: Row) -> dict[str, Any]:
    standing = {"best": row.standing == BEST, "mark": MARKS.get(row.standing, "")}
    return {"mean": number(row.accuracy.mean), "half": half_text(row.accuracy).strip(), **standing}
