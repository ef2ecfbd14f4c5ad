"""What a sweep says: how far it is, how long it will take, how it ended."""

from collections.abc import Sequence
from statistics import mean
from typing import Any


def job_seconds(results: Sequence[dict[str, Any]]) -> list[float]:
    """How long each of these jobs would take again, in seconds: all phases as measured, but the float network as it takes the job that
    found it trained."""
    phases = [result.get("seconds") or {} for result in results]
    found = min((part.get("float", 0.0) for part in phases), default=0.0) if len(phases) > 1 else 0.0
    return [sum(value for name, value in part.items() if name != "float") + min(found, part.get("float", 0.0)) for part in phases]


def seconds_left(left: Sequence[str], measured: Sequence[tuple[str, float]]) -> float | None:
    """Estimate for the jobs that are left: the mean of those of the same kind, or of all where there is none; None when none is measured.

    Args:
        left: kind of every job to come.
        measured: (kind, seconds) of every finished job.
    """
    if not measured:
        return None
    overall = mean(seconds for _, seconds in measured)
    of_kind = {kind: mean(seconds for other, seconds in measured if other == kind) for kind, _ in measured}
    return sum(of_kind.get(kind, overall) for kind in left)


def about(seconds: float | None) -> str:
    """'about 41 min left' and the like."""
    if seconds is None:
        return "time left not known yet"
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute left"
    hours, rest = divmod(minutes, 60)
    return f"about {hours} h {rest} min left" if hours else f"about {minutes} min left"


def job_line(number: int, total: int, failed: int, label: str, left: float | None) -> str:
    """The line before a job: 'job 12 of 84 (3 failed), static w4a8_per_tensor seed 1, about 41 min left'."""
    return f"job {number} of {total}{f' ({failed} failed)' if failed else ''}, {label}, {about(left)}"


def table_lines(rows: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
    """A line each of (label, result): accuracies as shares of the test split, or how the job ended."""
    width = max(len(label) for label, _ in rows)
    lines = [f"{'job':<{width}}  {'float':>6}  {'ptq':>6}  {'fake-q':>6}  {'int':>6}"]
    for label, result in rows:
        accuracy = result.get("accuracy") or {}
        numbers = "  ".join(f"{accuracy[key]:6.4f}" for key in ("float", "ptq", "fake_quant", "integer") if key in accuracy)
        lines.append(f"{label:<{width}}  {numbers or result['status']}" + ("  (tuning)" if result.get("tuning") else ""))
    return lines


def status_line(ok: int, failed: int, total: int, impossible: int) -> str:
    """'80 of 84 jobs ok, 3 failed, 1 not done; 12 combinations not possible'."""
    counts = [f"{ok} of {total} jobs ok"]
    counts += [f"{count} {what}" for count, what in ((failed, "failed"), (total - ok - failed, "not done")) if count]
    return ", ".join(counts) + (f"; {impossible} combination{'s' * (impossible > 1)} not possible" if impossible else "")
