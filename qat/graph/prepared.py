"""A captured network that remembers what was done to it, through deepcopy and pickle."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import TensorMetadata

from qat.errors import QATError
from qat.graph.report import FoldReport, StepReport

Model = TypeVar("Model", bound=nn.Module)


class QuantGraph(fx.GraphModule):
    """GraphModule with a fold report. `meta` holds plain state: it is what fx carries through deepcopy."""

    @classmethod
    def finished(cls, graph: fx.GraphModule, report: FoldReport, source: nn.Module) -> QuantGraph:
        """Check and tidy a rewritten graph, attach its report and what was known of `source`, which it was captured from."""
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        done = cls(graph, graph.graph)
        done.meta["fold_report"] = report
        if isinstance(source, QuantGraph):
            done.meta["normal_outputs"] = copy.deepcopy(source.normal_outputs)
            done.meta["step_reports"] = copy.deepcopy(source.step_reports)
        done.train(source.training)
        return done

    @property
    def fold_report(self) -> FoldReport:
        return self.meta["fold_report"]

    @property
    def step_reports(self) -> list[StepReport]:
        """What the post-training steps taken so far did, in their order."""
        return self.meta.setdefault("step_reports", [])

    @property
    def normal_outputs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(mean, standard deviation) of the outputs of layers whose BatchNorm is gone, before the activation, by the layers' names."""
        return self.meta.setdefault("normal_outputs", {})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's.

        Raises:
            QATError: the state of a float network, for a prepared one.
        """
        of_float = set(self.meta.get("float_state", ()))
        own = set(self.state_dict()) - of_float
        if of_float.intersection(state_dict) and not own.intersection(state_dict):
            todo = "Use qat.load_float."
            raise QATError("load_state_dict", "a float network's state", "that of a prepared network", todo)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.normal_outputs.clear()  # they were of the weights before; also where a module around this one is loaded
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Another device or type, also for what `meta` holds."""
        super()._apply(fn, recurse)
        self.normal_outputs.update({name: (fn(mean), fn(deviation)) for name, (mean, deviation) in self.normal_outputs.items()})
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo.update({key: value for key, value in computed_tensors(self).items() if key not in memo})
        return super().__deepcopy__(memo)

    def __reduce__(self) -> tuple[Any, ...]:
        restore, arguments = super().__reduce__()
        shapes = [(*_call(node), _shape(node)) for node in self.graph.nodes]
        return _restore, (restore, arguments, dict(self.meta), self.training, shapes)


def copy_of(model: Model) -> Model:
    """A deep copy, of models that hold computed weights as well."""
    return copy.deepcopy(model, computed_tensors(model))


def computed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """A memo for deepcopy: weights that an earlier forward computed (weight_norm) by value, since torch copies leaves alone."""
    values = [value for module in model.modules() for value in vars(module).values()]
    return {id(value): value.detach().clone() for value in values if isinstance(value, Tensor) and not value.is_leaf}


def inputs_of(graph: fx.GraphModule, batch: Any) -> tuple[Any, ...]:
    """The positional inputs in an item of `batches`: a tensor, or a tuple or list of them.

    Raises:
        QATError: another number of inputs than the network has.
    """
    inputs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    places = [node for node in graph.graph.nodes if node.op == "placeholder"]
    # A placeholder's argument is its default.
    wanted = sum(not node.args for node in places)
    if not wanted <= len(inputs) <= len(places):
        found = f"a batch of {len(inputs)} items for a network of {wanted} input{'s' * (wanted != 1)}"
        raise QATError("batches", found, "inputs without labels", "Pass (images for images, _ in loader).")
    return inputs


def each_batch(batches: Any) -> Iterator[Any]:
    """The items of `batches`.

    Raises:
        QATError: a bare tensor, whose items would be taken for batches.
    """
    if isinstance(batches, Tensor):
        raise QATError("batches", f"a tensor of shape {tuple(batches.shape)}", "an iterable of batches", "Write [x] for one batch.")
    return iter(batches)


def _call(node: fx.Node) -> tuple[str, str]:
    return node.op, node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _shape(node: fx.Node) -> TensorMetadata | None:
    """What is known of a node's tensor, without its memory format, which torch.save cannot write."""
    seen = node.meta.get("tensor_meta")
    return seen._replace(memory_format=None) if isinstance(seen, TensorMetadata) else None


def _restore(restore: Any, arguments: tuple, meta: dict[str, Any], training: bool, shapes: Sequence[Any] = ()) -> QuantGraph:
    plain = restore(*arguments)
    graph = QuantGraph(plain, plain.graph)
    graph.meta.update(meta)
    graph.training = training
    # fx pickles code: the nodes are new ones, and know no shapes.
    if [_call(node) for node in graph.graph.nodes] == [tuple(call) for *call, _ in shapes]:
        for node, (*_, shape) in zip(graph.graph.nodes, shapes):
            if shape is not None:
                node.meta["tensor_meta"] = shape
    return graph
