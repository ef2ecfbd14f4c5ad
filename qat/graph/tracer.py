"""How a forward is followed: which modules stay whole, which values are fixed, and what torch.fx alone would lose without a word.

torch.fx records neither `torch.no_grad` nor the backward of an autograd function, and knows no shape. Here values that leave a no_grad
block are detached, autograd functions stay whole, and a condition on shapes is answered from the example unless the batch size decides it.
"""

from __future__ import annotations

import copy
import inspect
import operator
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import timm
import torch
from timm.models import get_notrace_functions, get_notrace_modules
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from qat.graph.kinds import BATCH_NORMS, FUNCTIONAL_LAYERS, FUNCTIONAL_NORMS, WEIGHTED, is_activation, is_drop_path, is_input_norm
from qat.graph.prepared import copy_of

_LIBRARIES = (Path(torch.__file__).parent, Path(timm.__file__).parent / "layers" / "trace_utils.py", Path(__file__).parent)
_SHAPE_ATTRIBUTES = ("shape", "ndim", "dtype")
_SHAPE_METHODS = ("size", "dim", "ndimension", "is_floating_point")


def bind(forward: Callable[..., Any], inputs: Iterable[Any], constants: dict[str, Any]) -> tuple[list[Any], dict[str, Any], list[str]]:
    """(positional arguments, keyword arguments, names of the inputs) of a call: constants by name, inputs in order, else defaults.

    Raises:
        TypeError: an argument without any of these.
    """
    left, names = list(inputs), []
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for p in inspect.signature(forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            names += [f"{p.name}_{i}" for i in range(len(left))]
            args, left = args + left, []
        elif p.kind is p.KEYWORD_ONLY and (p.name in constants or p.default is not p.empty):
            kwargs[p.name] = constants.get(p.name, p.default)
        elif p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD):
            continue
        elif p.name in constants:
            args.append(constants[p.name])
        elif left:
            names.append(p.name)
            args.append(left.pop(0))
        elif p.default is not p.empty:
            args.append(p.default)
        else:
            raise TypeError(f"missing a value for '{p.name}', which has no default")
    return args + left, kwargs, names


class AutogradFunction(nn.Module):
    """A torch.autograd.Function as a module, so that its own backward stays."""

    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function.apply(*args)


class Tracer(fx.Tracer):
    """Follows one forward; see the top of this file.

    Args:
        keep: tells by qualified name which modules not to look into.
        example_inputs: positional inputs of the forward without its constants.
        constants: arguments of the forward by name.

    Attributes:
        failed_in: qualified name of the innermost module whose forward raised.
        notes: what was answered from the example.
    """

    def __init__(self, keep: Callable[[str], bool], example_inputs: tuple, constants: dict[str, Any]):
        super().__init__(autowrap_functions=tuple(get_notrace_functions()), param_shapes_constant=True)
        self._keep, self._inputs, self._constants = keep, example_inputs, constants
        self._evaluating = False
        self.failed_in: str | None = None
        self.notes: list[str] = []

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        tracer, apply = self, inspect.getattr_static(torch.autograd.Function, "apply")

        def recorded(cls: type[torch.autograd.Function], *args: Any) -> Any:
            if not any(isinstance(a, fx.Proxy) for a in args):
                return apply.__get__(None, cls)(*args)
            name = f"{cls.__name__.lower()}_{len(list(tracer.root.children()))}"
            tracer.root.add_module(name, AutogradFunction(cls))
            return tracer.create_proxy("call_module", name, args, {})

        function = patch.object(torch.autograd.Function, "apply", classmethod(recorded))
        length = patch.object(fx.Proxy, "__len__", lambda proxy: tracer.count(proxy))
        with torch.enable_grad(), function, length:
            graph = super().trace(root)
        _detach_what_had_no_gradient(graph)
        return graph

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        # Not fx's own: that one knows no defaults that are tuples, and makes one input of *args.
        bound = root_fn.__get__(self.root)
        defaults = {p.name: (p.default,) for p in inspect.signature(bound).parameters.values() if p.default is not p.empty}
        _, _, names = bind(bound, self._inputs, self._constants)
        proxies = [self.create_proxy("placeholder", name, defaults.get(name, ()), {}) for name in names]
        args, kwargs, _ = bind(bound, proxies, self._constants)
        return lambda root, *inputs: bound(*args, **kwargs), [self.root, *proxies]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if getattr(node.target, "__name__", "") in (*FUNCTIONAL_NORMS, *FUNCTIONAL_LAYERS):
            node.meta["source"] = source_line(traceback.extract_stack())
        if not torch.is_grad_enabled():
            node.meta["no_grad"] = True
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, (*WEIGHTED, *BATCH_NORMS, *get_notrace_modules()))
        whole = whole or is_activation(m) or is_drop_path(m) or is_input_norm(m) or self._keep(module_qualified_name)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._evaluating:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.failed_in is None:
                self.failed_in = self.path_of_module(m)
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._evaluating:
            return attr_val
        # fx would compute with a buffer at capture and keep the result: a checkpoint loaded later would not reach it.
        name = next((n for n, b in self.root.named_buffers() if b is attr_val), None) if isinstance(attr_val, Tensor) else None
        if name is None:
            return super().getattr(attr, attr_val, parameter_proxy_cache)
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy("get_attr", name, (), {})
        return parameter_proxy_cache[name]

    def to_bool(self, obj: fx.Proxy) -> bool:
        atoms = _shape_atoms(obj.node)
        if atoms is None:
            return super().to_bool(obj)
        try:
            answer, *seen = self._values([obj.node, *atoms], self._inputs)
            _, *seen_twice = self._values([obj.node, *atoms], self._twice())
        except Exception:
            return super().to_bool(obj)
        if seen != seen_twice:
            return super().to_bool(obj)
        line = source_line(traceback.extract_stack())
        note = f"forward asks for a shape, answered from example_inputs ({bool(answer)}), at {line}"
        if ": assert " not in line and note not in self.notes:
            self.notes.append(note)
        return bool(answer)

    def iter(self, obj: Any) -> Iterator[Any]:
        return (obj[i] for i in range(self.count(obj)))

    def count(self, obj: fx.Proxy) -> int:
        """Items of a shape, or of a tuple or list of tensors; a tensor's are its batch, and refused."""
        sizes = [value for inputs in (self._inputs, self._twice()) for value in self._values([obj.node], inputs)]
        if any(not isinstance(value, (tuple, list)) for value in sizes) or len(sizes[0]) != len(sizes[1]):
            raise fx.proxy.TraceError("a loop over a tensor, or its length, which follow the batch size")
        return len(sizes[0])

    def _twice(self) -> tuple:
        """The example with twice the batch."""
        return tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) and t.dim() else t, self._inputs)

    def _values(self, wanted: list[fx.Node], inputs: tuple) -> list[Any]:
        """What the nodes so far give on `inputs`, in evaluation."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        needed = _ancestors(wanted)
        for node in self.graph.nodes:
            if node in needed or node.op == "placeholder":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output([copies[node] for node in wanted])
        self._evaluating = True
        try:
            with torch.no_grad():
                return fx.Interpreter(copy_of(self.root).eval(), graph=graph).run(*own_inputs(inputs))
        finally:
            self._evaluating = False


def source_line(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's own code, `file:number: text`."""
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(lib) for lib in _LIBRARIES) and not f.filename.startswith("<")]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else "source line unknown"


def own_inputs(inputs: tuple) -> tuple:
    """A forward may change its inputs in place; each run gets tensors of its own."""
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else copy.deepcopy(x), inputs)


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _reads_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in _SHAPE_ATTRIBUTES


def _shape_atoms(node: fx.Node) -> list[fx.Node] | None:
    """The numbers read from shapes that a condition is made of; None where it is made of tensor values too."""
    inputs = node.all_input_nodes
    if node.op not in ("call_function", "call_method") or not inputs:
        return None
    if _reads_shape(node) or (node.target is operator.getitem and _reads_shape(inputs[0])):
        return [node]
    parts = [_shape_atoms(n) for n in inputs]
    if any(part is None for part in parts):
        return None
    # Two shapes that are equal are so for every batch.
    alike = node.target in (operator.eq, operator.ne) and len(inputs) == 2
    return [node] if alike else [atom for part in parts if part is not None for atom in part]


def _detach_what_had_no_gradient(graph: fx.Graph) -> None:
    for node in [n for n in graph.nodes if n.meta.get("no_grad") and n.op not in ("placeholder", "output")]:
        readers = [user for user in node.users if not user.meta.get("no_grad")]
        if readers and not _reads_shape(node):
            with graph.inserting_after(node):
                detached = graph.call_method("detach", (node,))
            for reader in readers:
                reader.replace_input_with(node, detached)
