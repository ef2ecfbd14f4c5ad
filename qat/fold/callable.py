"""`qat.fold` is this package and, by the fixed public name, the function that folds a model for inference: the package is callable."""

import sys
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    def __call__(self, model: Any, example_inputs: tuple, overrides: Any = None, concrete_args: Any = None) -> Any:
        # The room above is entered only when a user calls through this name.
        from qat.graph.fold import fold

        return fold(model, example_inputs, overrides, concrete_args)


def make_callable(package: str) -> None:
    """Let the imported package be called: qat.fold(model, example_inputs)."""
    sys.modules[package].__class__ = CallablePackage
