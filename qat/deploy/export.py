"""The integer network as an ONNX file of QuantizeLinear, DequantizeLinear and ordinary operators."""

from __future__ import annotations

import ast
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import onnx
import torch
from onnxscript import opset21 as op
from torch import Tensor, fx

import qat.deploy.operators  # noqa: F401 - registers the operators translated below
from qat.deploy.modules import IntegerLayer, QuantizeDequantize
from qat.deploy.targets import check_target, saturation_risk
from qat.errors import QATError
from qat.graph.prepared import inputs_of
from qat.targets import TARGETS

OPSET = 21


def _quantize(x, scale, zero_point):  # type: ignore[no-untyped-def]
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(codes, scale, zero_point=None, axis: int = 0):  # type: ignore[no-untyped-def]
    # A zero-point input on a convolution's weight keeps onnxruntime from fusing it, so these and the biases have none.
    if zero_point is None:
        return op.DequantizeLinear(codes, scale, axis=axis)
    return op.DequantizeLinear(codes, scale, zero_point, axis=axis)


def export_onnx(
    converted: fx.GraphModule,
    example_inputs: tuple,
    path: str | Path,
    target: str | None = None,
    notes: Mapping[str, str] | None = None,
    int4: bool = False,
) -> Path:
    """Write `converted` to `path`; the batch dimension of every input is dynamic.

    The output of each activation's QuantizeLinear is named after its quantizer, so that `verify` can compare tensor by tensor.

    Args:
        target: key of `qat.targets.TARGETS`; None for the one `check_target` finds.
        notes: more metadata of the file.
        int4: store weights of 4 bits or fewer as ONNX INT4, in half the space. onnxruntime then computes their layers in float (to the
            same integers), so that a file of int8 is the faster one.

    Raises:
        QATError: not a converted network, or one with what the target cannot compute; int4 without such weights.
        ConfigError: unknown target.
    """
    grids = grid_names(converted)
    target = check_target(converted, target)
    small = [name for name, m in converted.named_modules() if isinstance(m, IntegerLayer) and m.bits <= 4]
    if int4 and (not small or not TARGETS[target].int4):
        found = f"target '{target}', which computes something else from INT4" if small else "no layer with weights of 4 bits or fewer"
        raise QATError("export_onnx", f"int4=True with {found}", "weights and a target for it", "Leave out int4.")
    path = Path(path)
    _check_arguments(converted, example_inputs, path, notes or {})
    inputs = [f"input_{i}" if i else "input" for i in range(len(example_inputs))]
    # Tensors of their own: the exporter takes one tensor given twice for one input.
    example = tuple(torch.cat([x.cpu(), x.cpu()]) for x in example_inputs)
    operators = torch.ops.qat
    with warnings.catch_warnings(), _one_line():
        # The exporter warns of its own internals; nothing in them is a user's to act on.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            converted,
            example,
            dynamo=True,
            opset_version=OPSET,
            input_names=inputs,
            dynamic_shapes=tuple({0: torch.export.Dim("batch")} for _ in example),
            custom_translation_table={operators.quantize.default: _quantize, operators.dequantize.default: _dequantize},
            verbose=False,
        )
    if program is None:
        raise QATError("export_onnx", "no program from the exporter", "an ONNX program", "Check that the converted network runs.")
    model = program.model_proto
    merged = _name_activations(model, grids)
    _drop_traces(model)
    _own_zero_points(model)
    if int4:
        _pack_int4(model, {f"{name}.codes" for name in small})
    layers = [m for m in converted.modules() if isinstance(m, IntegerLayer)]
    risk = saturation_risk(layers)
    own = {"qat.target": target, "qat.opset": str(OPSET), "qat.saturation_risk": json.dumps(risk), "qat.merged": json.dumps(merged)}
    onnx.helper.set_model_props(model, {**(notes or {}), **own})
    onnx.checker.check_model(model, full_check=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    onnx.save(model, unfinished)
    os.replace(unfinished, path)
    return path


def grid_names(converted: fx.GraphModule, where: str = "export_onnx") -> list[str]:
    """Names of the activation grids in the order the graph applies them.

    Raises:
        QATError: not a converted network.
    """
    modules = dict(converted.named_modules(remove_duplicate=False))
    nodes = converted.graph.nodes if isinstance(converted, fx.GraphModule) else ()
    names = [str(n.target) for n in nodes if n.op == "call_module" and isinstance(modules[str(n.target)], QuantizeDequantize)]
    if not names:
        raise QATError(where, type(converted).__name__, "a network from qat.convert", "Call qat.convert(prepared) first.")
    return names


def _check_arguments(converted: fx.GraphModule, example_inputs: Any, path: Path, notes: Mapping[str, str]) -> None:
    if not isinstance(example_inputs, tuple) or not all(isinstance(x, Tensor) for x in example_inputs):
        kind = type(example_inputs).__name__
        raise QATError("example_inputs", f"a {kind}", "a tuple of tensors", "Write (x,) for one input.")
    inputs_of(converted, example_inputs)
    for i, x in enumerate(example_inputs):
        if x.dim() == 0 or x.dtype != torch.float32 or not len(x):
            found = f"shape {tuple(x.shape)}, {x.dtype}"
            raise QATError(f"example_inputs[{i}]", found, "a float32 tensor whose first dimension is the batch", "Pass a batch of inputs.")
    if not path.parent.is_dir() or path.is_dir():
        raise QATError(str(path), "no place for a file", "a file name in a folder that exists", f"Make {path.parent}, or name a file.")
    for key, value in notes.items():
        if not isinstance(value, str):
            raise QATError(f"notes['{key}']", f"a {type(value).__name__}", "text", "Write json.dumps(value).")


@contextmanager
def _one_line() -> Iterator[None]:
    """The exporter's own error, said in one line; it has often the network's own behind it."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        said = " ".join(str(cause).split())[:300]
        todo = "Try the example inputs on the converted network first."
        raise QATError("export_onnx", f"{type(cause).__name__} ({said})", "a network that torch.onnx.export takes", todo) from error


def _name_activations(model: onnx.ModelProto, grids: list[str]) -> list[str]:
    """Name the output of each QuantizeLinear after its quantizer.

    Returns:
        quantizers without a node: the exporter computes equal constants once.
    """
    renamed = {n.output[0]: _module_of(n) for n in model.graph.node if n.op_type == "QuantizeLinear"}
    unknown = set(renamed.values()) - set(grids)
    if unknown or len(set(renamed.values())) < len(renamed):
        what = f"QuantizeLinear of {sorted(unknown)[0]}" if unknown else "two QuantizeLinear nodes of one quantizer"
        raise QATError("export_onnx", what, "one node a quantizer", "Report this network and the version of torch.")
    for node in model.graph.node:
        node.input[:] = [renamed.get(x, x) for x in node.input]
        node.output[:] = [renamed.get(x, x) for x in node.output]
    del model.graph.value_info[:]
    return [name for name in grids if name not in renamed.values()]


def _module_of(node: onnx.NodeProto) -> str:
    """Qualified name of the module whose forward a node comes from, as the exporter notes it."""
    scopes = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), "[]")
    return str((ast.literal_eval(scopes) or ["", ""])[-2])


def _drop_traces(model: onnx.ModelProto) -> None:
    """Remove the exporter's notes on each node: source lines and paths of this machine, of no use in a file that is shipped."""
    for item in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer, model.graph):
        del item.metadata_props[:]


def _own_zero_points(model: onnx.ModelProto) -> None:
    """Give each activation a zero-point initialiser of its own: onnxruntime does not fuse layers around a shared one."""
    initializers = {i.name: i for i in model.graph.initializer}
    users = {n.output[0]: n for n in model.graph.node if n.op_type == "QuantizeLinear"}
    for name, quantize in users.items():
        readers = [n for n in model.graph.node if n.op_type == "DequantizeLinear" and n.input[0] == name]
        own = onnx.TensorProto()
        own.CopyFrom(initializers[quantize.input[2]])
        own.name = f"{name}.own_zero_point"
        model.graph.initializer.append(own)
        for node in (quantize, *readers):
            node.input[2] = own.name
    _drop_unused(model)


def _pack_int4(model: onnx.ModelProto, names: set[str]) -> None:
    """Store the weights of these names as INT4, with zero points of the same type."""
    for initializer in [i for i in model.graph.initializer if i.name in names]:
        codes = onnx.numpy_helper.to_array(initializer)
        initializer.CopyFrom(onnx.numpy_helper.from_array(codes.astype(ml_dtypes.int4), initializer.name))
        for node in model.graph.node:
            if node.op_type == "DequantizeLinear" and node.input[0] == initializer.name and len(node.input) > 2:
                zeros = next(i for i in model.graph.initializer if i.name == node.input[2])
                own = onnx.numpy_helper.to_array(zeros).astype(ml_dtypes.int4)
                node.input[2] = f"{initializer.name}.zero_points"
                model.graph.initializer.append(onnx.numpy_helper.from_array(own, node.input[2]))
    _drop_unused(model)


def _drop_unused(model: onnx.ModelProto) -> None:
    used = {x for n in model.graph.node for x in n.input}
    kept = [i for i in model.graph.initializer if i.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
