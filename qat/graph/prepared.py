"""A captured network that remembers what was done to it, through deepcopy and pickle."""

from __future__ import annotations

from typing import Any

from torch import fx

from qat.graph.report import FoldReport


class QuantGraph(fx.GraphModule):
    """GraphModule with a fold report. `meta` holds plain state: it is what fx carries through deepcopy."""

    @classmethod
    def finished(cls, graph: fx.GraphModule, report: FoldReport, training: bool) -> QuantGraph:
        """Check and tidy a rewritten graph, and attach its report."""
        graph.graph.lint()
        graph.delete_all_unused_submodules()
        done = cls(graph, graph.graph)
        done.meta["fold_report"] = report
        done.train(training)
        return done

    @property
    def fold_report(self) -> FoldReport:
        return self.meta["fold_report"]

    def __reduce__(self) -> tuple[Any, ...]:
        restore, arguments = super().__reduce__()
        return _restore, (restore, arguments, dict(self.meta), self.training)


def _restore(restore: Any, arguments: tuple, meta: dict[str, Any], training: bool) -> QuantGraph:
    plain = restore(*arguments)
    graph = QuantGraph(plain, plain.graph)
    graph.meta.update(meta)
    graph.training = training
    return graph
