"""ReLU in the place of ReLU6, which no scale passes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn

from qat.fold.base import built_in_activation


def replace_clips(graph: fx.GraphModule, clips: list[fx.Node]) -> None:
    """Put ReLU at each of these calls, modules or functions; a module that is called elsewhere as well stays there."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    for node in clips:
        if node.op == "call_function":
            node.target, node.args, node.kwargs = F.relu, (node.all_input_nodes[0],), {}
            continue
        name = str(node.target)
        if not isinstance(modules[name], nn.Hardtanh):
            _replace_inside(modules[name])
            continue
        if sum(modules.get(str(other.target)) is modules[name] for other in graph.graph.nodes if other.op == "call_module") > 1:
            name = f"{name}_{node.name}"
            node.target = name
        graph.add_submodule(name, nn.ReLU().train(graph.training))
    graph.recompile()


def _replace_inside(bn: nn.Module) -> None:
    """The activation that a BatchNorm has built in."""
    inside = built_in_activation(bn)
    for owner in (bn, *inside.modules()):
        for key, child in owner.named_children():
            if isinstance(child, nn.Hardtanh):
                setattr(owner, key, nn.ReLU().train(bn.training))
