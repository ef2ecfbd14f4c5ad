"""Proof that a file, integers alone and the trained network compute what was converted: activations compared integer by integer."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from qat.choose import check_name
from qat.deploy.export import grid_names
from qat.deploy.modules import QuantizeDequantize
from qat.deploy.reference import IntegerReference
from qat.deploy.runtime import RUNTIMES, Run, open_file, read_file
from qat.errors import QATError
from qat.graph.lifecycle import activation_quantizers, set_fake_quant
from qat.graph.prepared import QuantGraph, each_batch, inputs_of
from qat.quant import FakeQuantizer


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
    """Agreement of another computation with the converted network, a row for each activation tensor in graph order."""

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


def verify(
    converted: fx.GraphModule, path: str | Path, batches: Iterable[Any], runtime: str = "onnxruntime", stepwise: bool = False
) -> ParityReport:
    """Run `path` in a runtime beside `converted` and compare the integers of every activation.

    OpenVINO fuses a graph otherwise where inner tensors are asked for, so there only the outputs are compared.

    Args:
        runtime: key of `qat.deploy.runtime.RUNTIMES`.
        stepwise: compute every tensor from the integers that `converted` has before it; onnxruntime only. Else a sum that lies half-way
            between two codes but for the last bit of a float32, and goes the other way, grows in the layers behind it. Fused layers have
            no such sums; those that the runtime computes in float have.

    Raises:
        QATError: no batch given, a file without the tensors of this network, a runtime that is not installed.
        ConfigError: unknown runtime.
    """
    check_name("runtime", runtime, RUNTIMES)
    model = read_file(path)
    merged = json.loads({p.key: p.value for p in model.metadata_props}.get("qat.merged", "[]"))
    grids = {name: grid for name, grid in _grids(converted).items() if name not in merged}
    if runtime == "openvino":
        return _compare(converted, *_outputs(converted, grids, open_file(path, runtime)), batches)
    _add_activations_as_outputs(model, Path(path), list(grids))
    names = [output.name for output in model.graph.output]
    opened: list[Run] = []

    def run(batch: Any) -> dict[str, Tensor]:
        inputs = inputs_of(converted, batch)
        given = _codes(converted, grids, batch) if stepwise else {}
        if not opened:
            _read_activations_from_inputs(model, given, len(inputs[0]))
            opened.append(open_file(model.SerializeToString(), runtime))
        return dict(zip(names, map(torch.from_numpy, opened[0]((*inputs, *given.values()))), strict=True))

    return _compare(converted, grids, run, batches)


def verify_integers(converted: fx.GraphModule, batches: Iterable[Any], multipliers: str = "float", stepwise: bool = False) -> ParityReport:
    """Compare the integers of every activation of `converted` with those of `IntegerReference`, which computes with integers alone.

    Args:
        stepwise: compute every tensor from the integers that `converted` has before it. Else a sum that lies half-way between two codes
            but for the last bit of a float32, and goes the other way, grows in the layers behind it.

    Raises:
        QATError: no batch given, not a converted network, or sums that leave int32.
        ConfigError: unknown kind of multipliers.
    """
    reference, grids = IntegerReference(converted, multipliers), _grids(converted)

    def run(batch: Any) -> dict[str, Tensor]:
        return reference.run_codes(*inputs_of(converted, batch), given=_codes(converted, grids, batch) if stepwise else None)

    return _compare(converted, grids, run, batches)


def verify_trained(prepared: QuantGraph, converted: fx.GraphModule, batches: Iterable[Any], stepwise: bool = False) -> ParityReport:
    """Compare the integers of every activation of `converted` with those behind the trained network in evaluation.

    Args:
        stepwise: as in `verify_integers`.

    Raises:
        QATError: no batch given.
    """
    if not all(m.enabled for m in prepared.modules() if isinstance(m, FakeQuantizer)):
        raise QATError("verify_trained", "fake quantization switched off", "a network that quantizes", "Call qat.set_fake_quant(prepared).")
    network = copy.deepcopy(prepared).eval().cpu()
    quantizers = activation_quantizers(network)
    grids = {name: grid for name, grid in _grids(converted).items() if name in quantizers}

    def run(batch: Any) -> dict[str, Tensor]:
        given = _seen(converted, grids, lambda grid, x: grid.forward(x), batch) if stepwise else {}
        handles = [quantizers[name].register_forward_hook(lambda m, i, o, value=value: value) for name, value in given.items()]
        try:
            return _seen(network, quantizers, lambda quantizer, x: quantizer.codes(x), batch)
        finally:
            for handle in handles:
                handle.remove()

    return _compare(converted, grids, run, batches)


def _grids(converted: fx.GraphModule) -> dict[str, QuantizeDequantize]:
    """Activation grids by name, in graph order."""
    modules: dict[str, Any] = dict(converted.named_modules(remove_duplicate=False))
    return {name: modules[name] for name in grid_names(converted, "verify")}


def _outputs(
    converted: fx.GraphModule, grids: dict[str, QuantizeDequantize], opened: Run
) -> tuple[dict[str, QuantizeDequantize], Callable[[Any], dict[str, Tensor]]]:
    """The grids of the network's quantized outputs, and a function of a batch that gives their codes."""
    returned = tree_leaves(next(node for node in converted.graph.nodes if node.op == "output").args[0])
    places = {str(node.target): i for i, node in enumerate(returned) if isinstance(node, fx.Node) and str(node.target) in grids}
    if not places:
        raise QATError("verify", "no quantized output", "a network whose output is quantized", "Compare it with another runtime.")
    kept = {name: grids[name] for name in places}

    def run(batch: Any) -> dict[str, Tensor]:
        values = opened(batch)
        return {name: kept[name].codes(torch.from_numpy(values[i])) for name, i in places.items()}

    return kept, run


def signal_to_noise(prepared: QuantGraph, converted: fx.GraphModule, batches: Iterable[Any]) -> dict[str, float]:
    """SQNR in dB of every activation tensor by name: 10 log10 of the float network's energy over that of the difference to the integers.

    Args:
        prepared: the network that `converted` comes from; with its fake quantization off it is the float network.
    """
    network = copy.deepcopy(prepared).eval().cpu()
    set_fake_quant(network, weights=False, activations=False)
    quantizers = activation_quantizers(network)
    grids = {name: m for name, m in converted.named_modules() if name in quantizers}
    if not grids:
        raise QATError("signal_to_noise", "networks without a common quantizer", "a prepared network and its converted one", "Pass both.")
    energy = {name: [0.0, 0.0] for name in grids}
    seen = 0
    for batch in each_batch(batches):
        seen += 1
        floats = _seen(network, {name: quantizers[name] for name in grids}, lambda _, x: x, batch)
        integers = _seen(converted, grids, lambda grid, x: grid.forward(x), batch)
        for name, sums in energy.items():
            sums[0] += float(floats[name].double().square().sum())
            sums[1] += float((floats[name].double() - integers[name].double()).square().sum())
    if not seen:
        raise QATError("signal_to_noise", "no batches", "at least one batch of inputs", "Pass an iterable of tensors.")
    return {name: math.inf if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise) for name, (signal, noise) in energy.items()}


def _compare(
    converted: fx.GraphModule,
    grids: dict[str, QuantizeDequantize],
    run: Callable[[Any], dict[str, Tensor]],
    batches: Iterable[Any],
) -> ParityReport:
    totals = {name: [0, 0, 0] for name in grids}
    for batch in each_batch(batches):
        if any(isinstance(x, Tensor) and x.numel() == 0 for x in inputs_of(converted, batch)):
            raise QATError("verify", "an empty batch", "batches of at least one input", "Leave it out.")
        expected, got = _codes(converted, grids, batch), run(batch)
        for name, codes in expected.items():
            if codes.shape != got[name].shape:
                raise QATError(name, f"{tuple(got[name].shape)}", f"{tuple(codes.shape)}, as convert() gives", "Export it again.")
            difference = (codes.int() - got[name].int()).abs()
            row = totals[name]
            row[0] += difference.numel()
            row[1] += int((difference == 0).sum())
            row[2] = max(row[2], int(difference.max()))
    if not any(row[0] for row in totals.values()):
        raise QATError("verify", "no batches", "at least one batch of inputs", "Pass an iterable of tensors.")
    return ParityReport(tuple(TensorParity(name, *row) for name, row in totals.items() if row[0]))


def _add_activations_as_outputs(model: onnx.ModelProto, path: Path, names: list[str]) -> None:
    types = {n.output[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    missing = [name for name in names if name not in types]
    if missing:
        raise QATError(
            str(path), f"no tensor '{missing[0]}'", "the file written from this network", "Export it again with qat.export_onnx."
        )
    kinds = {i.name: i.data_type for i in model.graph.initializer}
    for name in names:
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kinds[types[name].input[2]], None))


def _read_activations_from_inputs(model: onnx.ModelProto, given: dict[str, Tensor], batch: int) -> None:
    """Make every reader of these tensors read an input of the file instead, in this order behind the inputs it has."""
    kinds = {torch.int8: onnx.TensorProto.INT8, torch.uint8: onnx.TensorProto.UINT8}
    for name, codes in given.items():
        new = f"{name}.given"
        shape = ["batch" if i == 0 and size == batch else size for i, size in enumerate(codes.shape)]
        model.graph.input.append(onnx.helper.make_tensor_value_info(new, kinds[codes.dtype], shape))
        for node in model.graph.node:
            node.input[:] = [new if x == name else x for x in node.input]


def _codes(converted: fx.GraphModule, grids: dict[str, QuantizeDequantize], batch: Any) -> dict[str, Tensor]:
    return _seen(converted, grids, lambda grid, x: grid.codes(x), batch)


def _seen(network: fx.GraphModule, modules: Mapping[str, Any], what: Callable[[Any, Tensor], Tensor], batch: Any) -> dict[str, Tensor]:
    """what(module, input) of every module by name, in one pass over a batch."""
    seen: dict[str, Tensor] = {}

    def keep(name: str):  # type: ignore[no-untyped-def]
        def hook(module: torch.nn.Module, inputs: tuple) -> None:
            seen[name] = what(modules[name], inputs[0])

        return hook

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            network(*inputs_of(network, batch))
    finally:
        for handle in handles:
            handle.remove()
    return seen
