"""One number a layer: noise of its output, and the loss it costs alone."""

from typing import Any

from qat.report.plots.style import FLOAT, ROUNDED, SMALL, TEXT, figure_of, list_layers, rows_height, tidy, to_svg

MOST = 15  # layers in the list of those that cost the most


def sqnr_picture(layers: dict[str, Any]) -> str:
    """SQNR of every activation tensor in dB, in the order of the network.

    Args:
        layers: content of layers.json.

    Returns:
        SVG; "" where nothing of it was measured.
    """
    values = _known(layers, "sqnr")
    return _bars(values, "SQNR (dB)", "{:z.1f}") if values else ""


def alone_picture(layers: dict[str, Any]) -> str:
    """Increase of the loss by each layer alone, the largest first, at most 15 of them.

    Args:
        layers: content of layers.json.

    Returns:
        SVG; "" where nothing of it was measured.
    """
    values = _known(layers, "alone")
    worst = sorted(values, key=lambda name: -values[name])[:MOST]
    return _bars({name: values[name] for name in worst}, "increase of the loss", "{:z.2g}") if values else ""


def _known(layers: dict[str, Any], section: str) -> dict[str, float]:
    return {name: value for name, value in (layers.get(section) or {}).items() if value is not None}


def _bars(values: dict[str, float], label: str, form: str) -> str:
    figure, axes = figure_of(rows_height(len(values)))
    bars = axes.barh(range(len(values)), list(values.values()), height=0.72, color=ROUNDED)
    axes.bar_label(bars, labels=[form.format(value) for value in values.values()], padding=2, fontsize=SMALL)
    axes.margins(x=0.16)
    axes.axvline(0, color=FLOAT, linewidth=0.8)
    axes.set_xlabel(label, fontsize=TEXT)
    tidy(axes)
    list_layers(axes, [name.removeprefix("quantizers.") for name in values])
    return to_svg(figure)
