"""Which normalisations can be folded into the layer before them, and why the others cannot.

A BatchNorm folds when its input is exactly one convolution's (or linear layer's) output: one consumer, one call site, the
channel axis where the layer puts it, running statistics present. All else is left in place with a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from torch import fx, nn

from qat.fold import check_foldable
from qat.graph.kinds import BATCH_NORMS, FUNCTIONAL_NORMS, WEIGHTED, describe, is_input_norm, module_of
from qat.graph.report import FoldReport


@dataclass(frozen=True)
class Pair:
    """A layer node and the BatchNorm node that reads nothing but it."""

    layer: fx.Node
    norm: fx.Node


def match(graph: fx.GraphModule, model: nn.Module, skips: Callable[[str], bool] = lambda name: False) -> tuple[list[Pair], FoldReport]:
    """Find the foldable pairs of `graph`, captured from `model` (nodes annotated with shapes), and a reason for every other norm."""
    modules = dict(graph.named_modules(remove_duplicate=False))
    calls = Counter(id(modules[str(n.target)]) for n in graph.graph.nodes if n.op == "call_module")
    shared = {key for key, names in owners(graph).items() if len(names) > 1}
    pairs, report = [], FoldReport()
    seen: set[int] = set()
    for node in graph.graph.nodes:
        module = module_of(node, modules)
        if getattr(node.target, "__name__", "") in FUNCTIONAL_NORMS:
            why_functional = "functional call: its parameters belong to no module; use the nn module to have it considered"
            report.left.append((node.name, f"{why_functional} ({node.meta.get('source', 'source line unknown')})"))
        if module is None or id(module) in seen:
            continue
        if not isinstance(module, BATCH_NORMS):
            inside = [(name, m) for name, m in module.named_modules() if name and (isinstance(m, BATCH_NORMS) or is_input_norm(m))]
            reason = f"inside '{node.target}', which is kept whole: it is not frozen or re-estimated either"
            report.left += [(f"{node.target}.{name}", reason) for name, m in inside if id(m) not in seen]
            seen |= {id(module), *(id(m) for _, m in inside)}
        if is_input_norm(module):
            why: str | None = f"{type(module).__name__} depends on each input: not a fixed affine map"
        elif isinstance(module, BATCH_NORMS):
            why = _reason(node, modules, calls, shared, skips)
        else:
            continue
        seen.add(id(module))
        if why is None:
            pairs.append(Pair(node.args[0], node))
            report.folded.append((str(node.args[0].target), str(node.target)))
        else:
            report.left.append((str(node.target), why))
    report.left += _uncalled(model, report)
    return pairs, report


def _uncalled(model: nn.Module, report: FoldReport) -> list[tuple[str, str]]:
    modules = dict(model.named_modules(remove_duplicate=False))
    told = {id(modules[name]) for name in [norm for _, norm in report.folded] + [norm for norm, _ in report.left] if name in modules}
    norms = [name for name, m in model.named_modules() if (isinstance(m, BATCH_NORMS) or is_input_norm(m)) and id(m) not in told]
    return [(name, "never called in the forward that was captured: not part of the network") for name in norms]


def _reason(norm: fx.Node, modules: dict[str, nn.Module], calls: Counter, shared: set[int], skips: Callable[[str], bool]) -> str | None:
    bn = modules[str(norm.target)]
    source = norm.args[0] if norm.args else norm.kwargs.get("input")
    if skips(str(norm.target)):
        return "skipped, or kept whole, by an override"
    if calls[id(bn)] > 1:
        return f"called at {calls[id(bn)]} places: one BatchNorm cannot be folded into several layers"
    if not isinstance(source, fx.Node) or not norm.args:
        return "called with keyword arguments"
    layer = module_of(source, modules)
    if not isinstance(layer, WEIGHTED):
        return f"its input is {describe(source, modules)}, not the output of a convolution or linear layer"
    name = str(source.target)
    if skips(name):
        return f"'{name}' is skipped, or kept whole, by an override"
    if calls[id(layer)] > 1:
        return f"'{name}' is called at {calls[id(layer)]} places"
    if len(source.args) != 1 or source.kwargs:
        return f"'{name}' is called with extra arguments"
    if len(source.users) > 1:
        readers = ", ".join(describe(user, modules) for user in source.users if user is not norm)
        return f"the output of '{name}' is also read by {readers}"
    if any(id(t) in shared for m in (layer, bn) for t in (*m.parameters(), *m.buffers())):
        return f"'{name}' or its BatchNorm shares a parameter or buffer with another layer, or the forward reads it"
    shape = source.meta["tensor_meta"].shape if "tensor_meta" in source.meta else ()
    if isinstance(layer, nn.Linear) and len(shape) != 2:
        return f"'{name}' gives rank {len(shape)}, where the BatchNorm's channel axis is not the layer's output axis"
    return check_foldable(layer, bn)


def owners(graph: fx.GraphModule) -> dict[int, list[str]]:
    """Who has each parameter or buffer, by its id: names of modules, and of nodes that read it beside its module."""
    found: dict[int, list[str]] = {}
    for name, module in graph.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            found.setdefault(id(tensor), []).append(name)
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            found.setdefault(id(attrgetter(str(node.target))(graph)), []).append(f"the forward ({node.name})")
    return found


def replace_norm(graph: fx.GraphModule, pair: Pair, activation: nn.Module) -> None:
    """Take the folded BatchNorm out of the graph; an activation it had built in takes its place and name."""
    if type(activation) is nn.Identity:
        pair.layer.meta["tensor_meta"] = pair.norm.meta["tensor_meta"]
        pair.norm.replace_all_uses_with(pair.layer)
        graph.graph.erase_node(pair.norm)
        return
    for module in activation.modules():
        if hasattr(module, "inplace"):
            setattr(module, "inplace", False)  # noqa: B010 - not an attribute nn.Module declares
    graph.set_submodule(str(pair.norm.target), activation)
