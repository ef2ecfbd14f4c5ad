"""Scales and ranges of every quantizer over a run."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from qat.report.plots.style import SMALL, TEXT, beside_rows, figure_of, list_layers, numbers, rows_height, to_svg

WEIGHT, ACTIVATION = ".weight_quantizer", "quantizers."
WIDEST = 3.0  # doublings that the colours show at most


def ranges_picture(layers: dict[str, Any], freeze: int | None = None, kind: str = "weights") -> str:
    """How the largest scale of each quantizer moved from the first moment on, in doublings, and its range at the last moment.

    Args:
        layers: content of layers.json.
        freeze: step of the freeze, which is marked.
        kind: weights, or activations.

    Returns:
        SVG; "" where no such ranges were recorded.
    """
    part = layers.get("ranges")
    if not part or not part["steps"] or not (tensors := _of_kind(part["tensors"], kind)):
        return ""
    return _heat(part["steps"], tensors, freeze)


def _of_kind(tensors: dict[str, Any], kind: str) -> dict[str, Any]:
    weights = kind == "weights"
    named = {name: tensor for name, tensor in tensors.items() if name.endswith(WEIGHT) is weights}
    return {name.removesuffix(WEIGHT).removeprefix(ACTIVATION): tensor for name, tensor in named.items()}


def doublings(tensor: dict[str, list[float | None]]) -> np.ndarray:
    """log2 of the largest scale over its first value; NaN where there is none."""
    scale = numbers(tensor["scale_high"])
    known = scale[np.isfinite(scale) & (scale > 0)]
    return np.log2(np.where(scale > 0, scale, np.nan) / known[0]) if known.size else np.full(scale.shape, np.nan)


def _heat(steps: list[int], tensors: dict[str, Any], freeze: int | None) -> str:
    figure, axes = figure_of(rows_height(len(tensors)) + 0.6)
    moves = np.stack([doublings(tensor) for tensor in tensors.values()])
    largest = float(np.abs(moves[np.isfinite(moves)]).max(initial=0.0))
    limit = min(max(largest, 0.25), WIDEST)
    image = axes.imshow(moves, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    axes.set_facecolor("#dddddd")
    list_layers(axes, list(tensors))
    axes.set_ylim(len(tensors) - 0.5, -0.5)
    beside_rows(axes, [_span(tensor["low"][-1], tensor["high"][-1]) for tensor in tensors.values()])
    axes.set_title("range at the end", loc="right", fontsize=SMALL)
    _steps_below(axes, steps, freeze)
    axes.set_xlabel("optimizer step", fontsize=TEXT)
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, shrink=0.9, extend="both" if largest > limit else "neither")
    bar.set_label("doublings of the largest scale since the first moment", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)
    return to_svg(figure)


def _span(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"± {high:.3g}" if low == -high else f"{low:.2g} … {high:.3g}"


def _steps_below(axes: Axes, steps: list[int], freeze: int | None) -> None:
    places = np.unique(np.linspace(0, len(steps) - 1, min(4, len(steps))).round().astype(int))
    axes.set_xticks(places, [str(steps[place]) for place in places], fontsize=SMALL)
    if freeze is not None and steps[0] <= freeze <= steps[-1] and len(steps) > 1:
        axes.axvline(float(np.interp(freeze, steps, range(len(steps)))) - 0.5, color="black", linewidth=1, linestyle=":")
