"""Whether a converted network can run on a target, and what an x86 machine without VNNI does to it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from qat.choose import check_name
from qat.deploy.elementwise import IntegerAdd
from qat.deploy.modules import IntegerLayer, QuantizeDequantize
from qat.errors import QATError
from qat.graph.kinds import is_addition_node, module_of
from qat.targets import TARGETS

DEFAULT_TARGET = "ort_x86"


def check_target(converted: fx.GraphModule, target: str | None) -> str:
    """The target to export for: the one given, else the one the network was prepared for, else `DEFAULT_TARGET`.

    Raises:
        ConfigError: unknown target.
        QATError: the network was trained for another target and has what this one cannot compute, or has activations it knows not at all.
    """
    own = converted.meta.get("target")
    if target is None:
        target = own or DEFAULT_TARGET
    check_name("target", target, TARGETS)
    layers = [m for m in converted.modules() if isinstance(m, IntegerLayer)]
    grids = [m for m in converted.modules() if isinstance(m, QuantizeDequantize)]
    largest = max((int(layer.codes.int().abs().max()) for layer in layers), default=0)
    # A network trained for no target in particular may run without VNNI under the session option: that is a risk, not an error.
    bits = largest.bit_length() + 1 if own is not None else 0
    problem = TARGETS[target].problem(bits, all(grid.spec.symmetric for grid in grids), _rounds_sums(converted))
    if problem is not None:
        trained = f"a network trained for {own}" if own else "a network"
        found, expected = problem
        todo = f"Train it with target={target}, or export it for {own or DEFAULT_TARGET}."
        raise QATError(f"target '{target}'", f"{trained} with {found}", expected, todo)
    return target


def _rounds_sums(converted: fx.GraphModule) -> bool:
    """Whether an addition reads no sums as they are, but is the only reader of a layer's quantized output."""
    modules = dict(converted.named_modules(remove_duplicate=False))
    for node in converted.graph.nodes:
        if not isinstance(module_of(node, modules), IntegerAdd) and not is_addition_node(node):
            continue
        operands = node.all_input_nodes
        if any(isinstance(module_of(operand, modules), IntegerLayer) for operand in operands):
            continue
        for operand in operands:
            quantized = isinstance(module_of(operand, modules), QuantizeDequantize) and len(operand.users) == 1
            if quantized and isinstance(module_of(operand.all_input_nodes[0], modules), IntegerLayer):
                return True
    return False


def saturation_risk(layers: Iterable[IntegerLayer]) -> list[str]:
    """Layers with a weight code beyond 7 bits.

    x86 without VNNI adds pairs of u8 x s8 products in saturating int16: 2 * 255 * 64 still fits, 2 * 255 * 127 does not.
    """
    return [layer.name for layer in layers if int(layer.codes.int().abs().max()) > 64]
