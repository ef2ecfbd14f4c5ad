"""Proof that the file computes what was converted: every activation tensor compared integer by integer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from qat.deploy.export import grid_names
from qat.deploy.modules import QuantizeDequantize
from qat.deploy.reference import IntegerReference
from qat.deploy.runtime import feed, session
from qat.errors import QATError
from qat.graph.prepared import each_batch, inputs_of


@dataclass(frozen=True)
class TensorParity:
    """One activation tensor: how many integers were compared, how many agree, the largest difference in LSB."""

    name: str
    compared: int
    equal: int
    max_lsb: int

    @property
    def identical(self) -> float:
        return self.equal / self.compared


@dataclass(frozen=True)
class ParityReport:
    """Agreement of onnxruntime with the converted network, a row for each activation tensor in graph order."""

    tensors: tuple[TensorParity, ...]

    @property
    def max_lsb(self) -> int:
        return max(row.max_lsb for row in self.tensors)

    @property
    def identical(self) -> float:
        """Share of identical integers over all tensors, 0 to 1."""
        return sum(row.equal for row in self.tensors) / sum(row.compared for row in self.tensors)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.tensors)
        rows = [f"{row.name:<{width}}  {row.identical:9.6f}  {row.max_lsb:3d}" for row in self.tensors]
        return "\n".join([f"{'tensor':<{width}}  identical  LSB", *rows, f"{'all':<{width}}  {self.identical:9.6f}  {self.max_lsb:3d}"])


def verify(converted: fx.GraphModule, path: str | Path, batches: Iterable[Any]) -> ParityReport:
    """Run `path` in onnxruntime beside `converted` and compare the integers of every activation.

    Raises:
        QATError: no batch given, or a file without the tensors of this network.
    """
    model = onnx.load(path)
    merged = json.loads({p.key: p.value for p in model.metadata_props}.get("qat.merged", "[]"))
    modules = dict(converted.named_modules(remove_duplicate=False))
    grids: dict[str, Any] = {name: modules[name] for name in grid_names(converted) if name not in merged}
    runtime = session(_with_activations_as_outputs(model, Path(path), list(grids)))
    names = [o.name for o in runtime.get_outputs()]

    def run(batch: Any) -> dict[str, Tensor]:
        outputs = runtime.run(None, feed(runtime, batch))
        return {name: torch.from_numpy(output) for name, output in zip(names, outputs, strict=True)}

    return _compare(converted, grids, run, batches)


def verify_integers(converted: fx.GraphModule, batches: Iterable[Any], multipliers: str = "float") -> ParityReport:
    """Compare the integers of every activation of `converted` with those of `IntegerReference`, which computes with integers alone.

    Raises:
        QATError: no batch given, not a converted network, or sums that leave int32.
        ConfigError: unknown kind of multipliers.
    """
    reference = IntegerReference(converted, multipliers)
    modules = dict(converted.named_modules(remove_duplicate=False))
    grids: dict[str, Any] = {name: modules[name] for name in grid_names(converted)}
    return _compare(converted, grids, lambda batch: reference.run_codes(*inputs_of(converted, batch)), batches)


def _compare(
    converted: fx.GraphModule,
    grids: dict[str, QuantizeDequantize],
    run: Callable[[Any], dict[str, Tensor]],
    batches: Iterable[Any],
) -> ParityReport:
    totals = {name: [0, 0, 0] for name in grids}
    for batch in each_batch(batches):
        expected, got = _codes(converted, grids, batch), run(batch)
        for name, codes in expected.items():
            difference = (codes.int() - got[name].int()).abs()
            row = totals[name]
            row[0] += difference.numel()
            row[1] += int((difference == 0).sum())
            row[2] = max(row[2], int(difference.max()))
    if not any(row[0] for row in totals.values()):
        raise QATError("verify", "no batches", "at least one batch of inputs", "Pass an iterable of tensors.")
    return ParityReport(tuple(TensorParity(name, *row) for name, row in totals.items() if row[0]))


def _with_activations_as_outputs(model: onnx.ModelProto, path: Path, names: list[str]) -> bytes:
    types = {n.output[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    missing = [name for name in names if name not in types]
    if missing:
        raise QATError(
            str(path), f"no tensor '{missing[0]}'", "the file written from this network", "Export it again with qat.export_onnx."
        )
    kinds = {i.name: i.data_type for i in model.graph.initializer}
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kinds[types[name].input[2]], None))
    return model.SerializeToString()


def _codes(converted: fx.GraphModule, grids: dict[str, QuantizeDequantize], batch: Any) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def keep(name: str, grid: QuantizeDequantize):  # type: ignore[no-untyped-def]
        def hook(module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
            seen[name] = grid.codes(inputs[0])

        return hook

    handles = [grid.register_forward_hook(keep(name, grid)) for name, grid in grids.items()]
    try:
        with torch.no_grad():
            converted(*inputs_of(converted, batch))
    finally:
        for handle in handles:
            handle.remove()
    return seen
