"""Whether a converted network can run on a target, and what an x86 machine without VNNI does to it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, fx

from qat.choose import check_name
from qat.deploy.elementwise import IntegerAdd
from qat.deploy.modules import IntegerLayer, QuantizeDequantize
from qat.errors import QATError
from qat.graph.kinds import arithmetic_of, module_of
from qat.targets import TARGETS


def check_target(converted: fx.GraphModule, target: str | None) -> str:
    """The target to export for: the one given, else the one the network was prepared for, else ort_x86, or ort_vnni where weights of
    more than 7 bits need it.

    Raises:
        ConfigError: unknown target.
        QATError: the network has what this target does not compute as it was trained.
    """
    own = converted.meta.get("target")
    layers = [m for m in converted.modules() if isinstance(m, IntegerLayer)]
    bits = max((_bits(layer.codes) for layer in layers), default=0)
    fallback = own or ("ort_x86" if bits <= TARGETS["ort_x86"].weight_bits else "ort_vnni")
    target = check_name("target", fallback if target is None else target, TARGETS)
    symmetric = all(m.spec.symmetric for m in converted.modules() if isinstance(m, QuantizeDequantize))
    half_way = not symmetric and (own is None or TARGETS[own].rounds_as_onnx)
    problem = TARGETS[target].problem(bits, symmetric, _rounds_sums(converted), half_way)
    if problem is not None:
        trained = f"a network trained for {own}" if own else "a network"
        found, expected = problem
        todo = f"Train it with target={target} (QATConfig.for_target('{target}')), or export it for {fallback}."
        raise QATError(f"target '{target}'", f"{trained} with {found}", expected, todo)
    return target


def _bits(codes: Tensor) -> int:
    """Bits of a signed grid that holds all codes."""
    return max(int(codes.max()).bit_length(), int(-codes.int().min() - 1).bit_length() if int(codes.min()) < 0 else 0) + 1


def _rounds_sums(converted: fx.GraphModule) -> bool:
    """Whether an addition reads no sums as they are, but is the only reader of a layer's quantized output."""
    modules = dict(converted.named_modules(remove_duplicate=False))
    for node in converted.graph.nodes:
        if not isinstance(module_of(node, modules), IntegerAdd) and arithmetic_of(node) not in ("add", "sub"):
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
    """Layers with weights of more than 7 bits.

    x86 without VNNI adds pairs of u8 x s8 products in saturating int16: 2 * 255 * 63 still fits, 2 * 255 * 127 does not.
    """
    return [layer.name for layer in layers if _bits(layer.codes) > TARGETS["ort_x86"].weight_bits]
