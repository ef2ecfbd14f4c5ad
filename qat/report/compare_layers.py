"""layers.json of several runs as means over seeds. Whatever does not have the expected shape is left out, section by section.

What comes out has the shape of layers.json (see docs/comparing.md), with numpy arrays in the place of lists and nan in that of null.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qat.report.compare_runs import is_number, read_json

Array = np.ndarray[Any, Any]
_ENDS = ("scale_low", "scale_high", "low", "high")


def mean_layers(folders: list[Path]) -> dict[str, Any]:
    """Means over runs; {} where no run has a layers.json, and no key for a section that none has.

    Scales are geometric means. Moments of runs with other steps than the first's are interpolated.
    """
    found = [read_json(folder / "layers.json") for folder in folders]
    sections: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
        "jitter": _jitter,
        "jitter_statistics": _jitter,
        "ranges": _ranges,
        "filters": _filters,
        "sqnr": _numbers,
        "alone": _numbers,
    }
    means = {}
    for name, mean in sections.items():
        own = [section for layers in found if isinstance(section := layers.get(name), dict) and section]
        if own and (values := mean(own)):
            means[name] = values
    return means


def array(values: Any) -> Array | None:
    """Numbers, nan for null; None where it is no list of numbers."""
    if not isinstance(values, list) or not all(value is None or is_number(value) for value in values):
        return None
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _steps(section: dict[str, Any]) -> Array | None:
    steps = array(section.get("steps"))
    return steps if steps is not None and len(steps) and np.isfinite(steps).all() and (np.diff(steps) > 0).all() else None


def nanmean(stack: list[Array]) -> Array:
    """Mean over the first axis without nan, nan where there is nothing else."""
    values = np.array(stack)
    there = np.isfinite(values)
    counts = there.sum(0)
    return np.where(counts > 0, np.where(there, values, 0).sum(0) / np.maximum(counts, 1), np.nan)


def _on(at: Array, steps: Array, values: Any) -> Array | None:
    own = array(values)
    if own is None or len(own) != len(steps):
        return None
    there = np.isfinite(own)
    if len(steps) == len(at) and (steps == at).all():
        return own
    return np.interp(at, steps[there], own[there], np.nan, np.nan) if there.any() else np.full(len(at), np.nan)


def _over_time(sections: list[dict[str, Any]], key: str) -> tuple[Array, list[tuple[Array, dict[str, Any]]]] | None:
    """The steps of the first usable section, and each with its own steps and its mapping under `key`."""
    usable = [
        (steps, section[key]) for section in sections if (steps := _steps(section)) is not None and isinstance(section.get(key), dict)
    ]
    return (usable[0][0], usable) if usable else None


def _jitter(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """{"steps", "layers": {name: shares}, "runs": median share over layers of each run}."""
    if (usable := _over_time(sections, "layers")) is None:
        return {}
    at, runs = usable
    layers: dict[str, list[Array]] = {}
    medians = []
    for steps, own in runs:
        shares = {name: share for name, values in own.items() if (share := _on(at, steps, values)) is not None}
        for name, share in shares.items():
            layers.setdefault(name, []).append(share)
        if shares:
            medians.append(nanmedian(np.array(list(shares.values()))))
    return {"steps": at, "layers": {name: nanmean(stack) for name, stack in layers.items()}, "runs": medians} if layers else {}


def nanmedian(values: Array) -> Array:
    """Median over the first axis without nan, nan where there is nothing else."""
    return np.array([np.median(column[np.isfinite(column)]) if np.isfinite(column).any() else np.nan for column in values.T])


def _ranges(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """{"steps", "tensors": {name: {"scale_low", "scale_high", "low", "high"}}}."""
    if (usable := _over_time(sections, "tensors")) is None:
        return {}
    at, runs = usable
    tensors: dict[str, dict[str, list[Array]]] = {}
    for steps, own in runs:
        for name, ends in own.items():
            values = {end: _on(at, steps, ends.get(end)) for end in _ENDS} if isinstance(ends, dict) else {}
            if values and all(value is not None for value in values.values()):
                for end, value in values.items():
                    tensors.setdefault(name, {}).setdefault(end, []).append(value)  # type: ignore[arg-type]
    return {"steps": at, "tensors": {name: {end: _mean_end(end, stack) for end, stack in ends.items()} for name, ends in tensors.items()}}


def _mean_end(end: str, stack: list[Array]) -> Array:
    if not end.startswith("scale"):
        return nanmean(stack)
    return np.exp(nanmean([np.log(np.where(values > 0, values, np.nan)) for values in stack]))


def _filters(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """{layer: {"before": widths or absent, "after": widths}}; of runs with another number of filters the first counts."""
    layers: dict[str, dict[str, list[Array]]] = {}
    for section in sections:
        for name, own in section.items():
            for when in ("before", "after"):
                values = array(own.get(when)) if isinstance(own, dict) else None
                if values is None or not len(values):
                    continue
                stack = layers.setdefault(name, {}).setdefault(when, [])
                if not stack or len(stack[0]) == len(values):
                    stack.append(values)
    return {name: {when: nanmean(stack) for when, stack in own.items()} for name, own in layers.items() if "after" in own}


def _numbers(sections: list[dict[str, Any]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for section in sections for name in section))
    found = {name: [section[name] for section in sections if is_number(section.get(name))] for name in names}
    return {name: float(np.mean(values)) for name, values in found.items() if values}
