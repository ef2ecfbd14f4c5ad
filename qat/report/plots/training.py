"""How a training went and what came of it: curves, accuracies, answers."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qat.report.colours import INK
from qat.report.plots.style import FLOAT, ROUNDED, SMALL, TEXT, WIDTH, figure_of, mark_freeze, short, tidy, to_svg


def _points(rows: list[dict[str, float]], key: str) -> tuple[list[float], list[float]]:
    return [row["step"] for row in rows if key in row], [row[key] for row in rows if key in row]


def _panel(axes: Axes, title: str, freeze_step: int | None) -> None:
    axes.set_title(title, loc="left", fontsize=TEXT)
    mark_freeze(axes, freeze_step)
    tidy(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=SMALL)


def curves(rows: list[dict[str, float]], freeze_step: int | None, float_accuracy: float) -> str:
    """Training loss and validation accuracy over steps, with the freeze marked.

    Args:
        rows: content of metrics.csv.
        float_accuracy: test accuracy of the float network, as the line to reach.
    """
    figure, (loss, accuracy) = figure_of(5.0, 2, sharex=True)
    loss.plot(*_points(rows, "train_loss_step"), color=ROUNDED, linewidth=1, label="training")
    loss.plot(*_points(rows, "val_loss"), color=INK, marker="o", markersize=3, linewidth=1, linestyle=(0, (5, 2)), label="validation")
    accuracy.plot(*_points(rows, "val_acc"), color=ROUNDED, marker="o", markersize=3, linewidth=1, label="validation, fake-quantized")
    accuracy.axhline(float_accuracy, color=FLOAT, linewidth=1, linestyle=(0, (5, 2)), label="float (test)")
    _panel(loss, "Loss", freeze_step)
    _panel(accuracy, "Accuracy", freeze_step)
    accuracy.set_xlabel("optimizer step", fontsize=TEXT)
    return to_svg(figure)


def accuracy_bars(accuracy: dict[str, float]) -> str:
    """One bar for each measured accuracy (fractions of the test split), in the order given."""
    figure, axes = figure_of(0.5 + 0.32 * len(accuracy))
    names = list(accuracy)[::-1]
    bars = axes.barh(names, [accuracy[name] for name in names], color=[FLOAT if name == "float" else ROUNDED for name in names])
    axes.bar_label(bars, labels=[f"{accuracy[name]:.4f}" for name in names], padding=3, fontsize=SMALL)
    axes.set_xlim(0, 1.2)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    tidy(axes)
    return to_svg(figure)


def confusion_picture(counts: list[list[int]], names: list[str]) -> str:
    """Confusion matrix, row = label, column = prediction; shades are shares of the row."""
    size = len(counts)
    side = min(WIDTH, 1.5 + 0.4 * size)
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    shares = [[count / max(sum(row), 1) for count in row] for row in counts]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    labels = [short(name, 16) for name in names]
    axes.set_xticks(range(size), labels, rotation=90, fontsize=SMALL)
    axes.set_yticks(range(size), labels, fontsize=SMALL)
    axes.set_xlabel("predicted", fontsize=TEXT)
    axes.set_ylabel("label", fontsize=TEXT)
    text = SMALL if size <= 12 else 6
    for i, row in enumerate(counts):
        for j, count in enumerate(row):
            if count:
                axes.text(j, i, str(count), ha="center", va="center", fontsize=text, color="white" if shares[i][j] > 0.5 else INK)
    return to_svg(figure)
