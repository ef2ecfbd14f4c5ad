"""In-place operations made out of place, with the same result for every reader.

`out += x` and an in-place ReLU change their input for whoever reads it afterwards. Each such reader is sent to the result
first; then the operation may be replaced by its pure form and a quantizer put between any two nodes.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    **{
        getattr(space, f"{name}_"): getattr(space, name)
        for space in (torch, F)
        for name in dir(space)
        if not name.startswith("_") and callable(getattr(space, f"{name}_", None)) and callable(getattr(space, name))
    },
}


def remove_inplace(module: fx.GraphModule) -> None:
    """Rewrite `module.graph` in place; modules with `inplace=True` are set to False (the model is a copy)."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        if not _is_inplace(node, module):
            continue
        changed = node.args[0]
        for reader in [user for user in changed.users if user in order and order[user] > order[node]]:
            reader.replace_input_with(changed, node)
        _make_pure(node)
    for submodule in module.modules():
        if getattr(submodule, "inplace", False) is True:
            setattr(submodule, "inplace", False)  # noqa: B010 - not an attribute nn.Module declares


def _is_inplace(node: fx.Node, module: fx.GraphModule) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_module":
        return getattr(module.get_submodule(str(node.target)), "inplace", False) is True
    if node.op == "call_method":
        name = str(node.target)
        return name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and (node.target in _OPERATORS or node.kwargs.get("inplace") is True)


def _make_pure(node: fx.Node) -> None:
    if node.op == "call_method":
        pure = str(node.target).removesuffix("_")
        # zero_, fill_, copy_ and random ones have no such form: they change the tensor that only they and later readers have.
        node.target = pure if callable(getattr(torch.Tensor, pure, None)) else node.target
    elif node.op == "call_function":
        node.target = _OPERATORS.get(node.target, node.target)
        if "inplace" in node.kwargs:
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "inplace"}
