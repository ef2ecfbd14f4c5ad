"""The tables of a report: rows of plain cells."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from qat.fold import FoldedConvBN
from qat.quant import FakeQuantizer


@dataclass(frozen=True)
class Table:
    """A title, column names and rows of as many cells."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = field(default="")


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def span(values: Tensor) -> str:
    """One number, or the smallest and largest of several."""
    low, high = float(values.min()), float(values.max())
    return number(low) if low == high else f"{number(low)} to {number(high)}"


def summary_table(result: dict[str, Any]) -> Table:
    """The scalar fields of a result, then the seconds of its phases."""
    plain = [[name, "-" if value is None else value] for name, value in result.items() if not isinstance(value, dict)]
    nested = [[f"{name}: {key}", value] for name in ("parity", "seconds") for key, value in result.get(name, {}).items()]
    return Table("Run", ["field", "value"], [[name, str(value)] for name, value in plain + nested])


def fold_table(network: nn.Module) -> Table:
    """What became of every normalisation."""
    report = getattr(network, "fold_report", None)
    if report is None:
        return Table("Folding", [], [], "No report.")
    rows = [[bn, "folded", f"into {conv}"] for conv, bn in report.folded] + [[name, "left", reason] for name, reason in report.left]
    return Table("Folding", ["normalisation", "", ""], rows, f"{len(report.folded)} folded, {len(report.left)} left.")


def quantizer_table(network: nn.Module) -> Table:
    """Every quantizer that has a range: grid, scale, zero point and the real numbers at the ends of the grid.

    Weights of folded layers show the scale that ships, that of the folded weight.
    """
    shipped = {
        f"{name}.weight_quantizer": layer.integer()[1]
        for name, layer in network.named_modules()
        if isinstance(layer, FoldedConvBN) and layer.weight_quantizer is not None
    }
    rows = []
    for name, module in network.named_modules():
        if not isinstance(module, FakeQuantizer) or not (name in shipped or module.initialized):
            continue
        scale, zero = shipped.get(name, module.scale).detach().double().cpu(), module.zero_point.detach().double().cpu()
        low, high = (module.spec.qmin - zero.round()) * scale, (module.spec.qmax - zero.round()) * scale
        kind = f"{module.spec.bits} bits, {'symmetric' if module.spec.symmetric else 'asymmetric'}"
        where = f"{scale.numel()} channels" if scale.ndim else "tensor"
        rows.append([name, kind, where, span(scale), span(zero.round()), number(float(low.min())), number(float(high.max()))])
    return Table("Quantizers", ["name", "grid", "per", "scale", "zero point", "from", "to"], rows)


def parity_table(parity: Any) -> Table:
    """A `ParityReport`, tensor by tensor."""
    rows = [[row.name, row.compared, f"{row.identical:.4%}", row.max_lsb] for row in parity.tensors]
    note = f"{parity.identical:.4%} of the integers are identical; the largest difference is {parity.max_lsb} LSB."
    return Table("Integers: reference and onnxruntime", ["tensor", "compared", "identical", "largest difference (LSB)"], rows, note)
