"""One torch.fx graph from a float model, or an error that names the module and the source line.

Convolutions, normalisations, activations and their subclasses (timm's BatchNormAct2d, Conv2dSame, ...) stay whole; see `tracer.py`.
The model is traced twice, for training and for evaluation: a branch on `self.training` cannot be baked in unseen.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._pytree import tree_leaves

from qat.choose import check_name
from qat.errors import CaptureError, QATError
from qat.graph.inplace import remove_inplace
from qat.graph.kinds import argument
from qat.graph.prepared import copy_of
from qat.graph.tracer import Tracer, bind, own_inputs, source_line


def capture(
    model: nn.Module,
    example_inputs: tuple,
    keep: Callable[[str], bool] = lambda name: False,
    concrete_args: dict[str, Any] | None = None,
) -> tuple[fx.GraphModule, list[str]]:
    """Trace a copy of `model`.

    Args:
        model: any module; it is left untouched.
        example_inputs: its positional inputs; further parameters of forward keep their defaults. They are left untouched.
        keep: tells by qualified name which modules not to look into.
        concrete_args: arguments of forward by name, fixed in the graph, which does not take them any more.

    Returns:
        the graph, every node with the shape and dtype seen on the example, and notes for the user.

    Raises:
        CaptureError: the forward depends on values, does not run on the example, or does there what the graph does not.
        QATError: example_inputs is no tuple; concrete_args names no argument of forward.
    """
    if not isinstance(example_inputs, tuple):
        found = type(example_inputs).__name__
        raise QATError("example_inputs", found, "a tuple of the model's positional inputs", "Write (x,) for a single input.")
    constants = _checked(model, concrete_args or {})
    expected = _run_once(model, example_inputs, constants)
    notes: list[str] = []
    training, evaluation = (_trace(copy_of(model).train(mode), example_inputs, keep, constants, notes) for mode in (True, False))
    graph = training
    if not _gives(training, example_inputs, expected):
        graph = evaluation
        if not _gives(evaluation, example_inputs, expected):
            raise CaptureError(
                type(model).__name__,
                "a traced graph that computes something else than the model on example_inputs",
                "a forward whose every operation torch.fx sees",
                "Look for in-place changes of views, random numbers in eval mode, or state changed by the forward; keep that module "
                "whole with overrides={'<its name>': {'leaf': True}}.",
            )
        notes.append("forward differs between training and evaluation: the evaluation branch was captured")
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    for name, module in graph.named_modules():
        module.training = modes.get(name, model.training)
    _annotate(graph, example_inputs)
    return graph, notes


def _checked(model: nn.Module, concrete_args: dict[str, Any]) -> dict[str, Any]:
    for name in concrete_args:
        check_name("concrete_args", name, list(inspect.signature(model.forward).parameters))
    return concrete_args


def _run_once(model: nn.Module, example_inputs: tuple, constants: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            args, kwargs, _ = bind(model.forward, own_inputs(example_inputs), constants)
            return copy_of(model).eval()(*args, **kwargs)
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) if isinstance(x, torch.Tensor) else type(x).__name__ for x in example_inputs)
        raise CaptureError(
            type(model).__name__,
            f"its forward fails on example_inputs ({shapes}): {error}",
            "inputs the float model accepts",
            "Pass a real batch.",
        ) from error


def _trace(
    model: nn.Module, example_inputs: tuple, keep: Callable[[str], bool], constants: dict[str, Any], notes: list[str]
) -> fx.GraphModule:
    tracer = Tracer(keep, example_inputs, constants)
    try:
        graph = tracer.trace(model)
    except Exception as error:
        where, line = tracer.failed_in or type(model).__name__, source_line(traceback.extract_tb(error.__traceback__))
        found = f"{str(error) or type(error).__name__} ({line})"
        name = tracer.failed_in or "<name of a module in it>"
        todo = (
            f"Keep it whole with overrides={{'{name}': {{'leaf': True}}}}, leave it and its output float with "
            f"overrides={{'{name}': {{'skip': True}}}}, or fix the argument that decides with concrete_args={{'<its name>': <value>}}."
        )
        raise CaptureError(where, found, "a forward that is one graph for every input", todo) from error
    notes += [note for note in tracer.notes if note not in notes]
    graph._tracer_cls = fx.Tracer
    module = fx.GraphModule(model, graph)
    _positional_inputs(module)
    _dropout_as_modules(module, model.training)
    remove_inplace(module)
    _drop_identities(module)
    graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    return module


def _positional_inputs(module: fx.GraphModule) -> None:
    """Calls such as conv(input=x) as conv(x)."""
    for node in module.graph.nodes:
        if node.op == "call_module" and not node.args and set(node.kwargs) == {"input"}:
            node.args, node.kwargs = (node.kwargs["input"],), {}


def _dropout_as_modules(module: fx.GraphModule, mode: bool) -> None:
    """F.dropout holds its `training` argument as traced in `mode`; a module follows train() and eval().

    A constant of the other mode is the model's own choice and stays.
    """
    kinds = {F.dropout: nn.Dropout, F.dropout1d: nn.Dropout1d, F.dropout2d: nn.Dropout2d, F.dropout3d: nn.Dropout3d}
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target in kinds and argument(node, 2, "training", True) == mode:
            p = argument(node, 1, "p", 0.5)
            name = f"functional_{node.name}"
            module.add_submodule(name, kinds[node.target](p))
            with module.graph.inserting_after(node):
                replacement = module.graph.call_module(name, (node.args[0] if node.args else node.kwargs["input"],))
            node.replace_all_uses_with(replacement)
            module.graph.erase_node(node)


def _drop_identities(module: fx.GraphModule) -> None:
    for node in list(module.graph.nodes):
        if node.op == "call_module" and type(module.get_submodule(node.target)) is nn.Identity:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _gives(graph: fx.GraphModule, example_inputs: tuple, expected: Any) -> bool:
    with torch.no_grad():
        got = _leaves(copy_of(graph).eval()(*own_inputs(example_inputs)))
    wanted = _leaves(expected)
    return len(wanted) == len(got) and all(map(_same_value, wanted, got))


def _leaves(outputs: Any) -> list[Any]:
    """Tensors and plain values in containers and dataclasses."""
    found = tree_leaves(outputs)
    parts = [[getattr(x, f.name) for f in fields(x)] if is_dataclass(x) and not isinstance(x, type) else None for x in found]
    return [leaf for x, part in zip(found, parts) for leaf in ([x] if part is None else _leaves(part))]


def _same_value(expected: Any, got: Any) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(expected == got)
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    tolerance = 1e-5 if expected.dtype in (torch.float32, torch.float64) else 1e-2
    finite = expected[torch.isfinite(expected)] if expected.is_floating_point() else expected[:0]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(got, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


def _annotate(graph: fx.GraphModule, example_inputs: tuple) -> None:
    scratch = copy_of(graph).eval()
    with torch.no_grad():
        ShapeProp(scratch).propagate(*own_inputs(example_inputs))
    for node, seen in zip(graph.graph.nodes, scratch.graph.nodes, strict=True):
        if "tensor_meta" in seen.meta:
            node.meta["tensor_meta"] = seen.meta["tensor_meta"]
