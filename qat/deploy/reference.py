"""An integer network computed with integers alone: what a machine without floating point would give [J17 sect. 2].

Activations are 8-bit codes, sums and biases int32, and between them stands one multiplier a channel, either a float or the fixed-point
number M0 2^-n. It shares neither kernels nor rounding code with `convert()`, whose float arithmetic it checks.

An activation of a quantized tensor is a table of its codes. One that does more than clip (SiLU, Hardswish) and is fused with a layer is
computed in float32 between the sums and their rounding; that, and what has no integer form, is listed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from qat.choose import check_name
from qat.deploy.elementwise import IntegerAdd, IntegerMultiply
from qat.deploy.integer_kernels import integer_kernels
from qat.deploy.modules import IntegerLayer, KeepFloat, QuantizeDequantize
from qat.errors import QATError
from qat.fold.arithmetic import native
from qat.fold.convolution import convolve
from qat.graph.kinds import arithmetic_of, is_activation_node, is_averaging_node, is_clip_node, is_concatenation_node, keeps_scale

MULTIPLIERS = {
    "float": "round(sum * M), M a float",
    "fixed": "sum * M0 >> n, rounded half to even, M0 an integer of 31 bits",
}
_MODULES: dict[type, str] = {IntegerAdd: "add", IntegerMultiply: "mul"}
_map: Any = fx.node.map_aggregate
_INT32 = 2**31
_FRACTION = 2**16


@dataclass(frozen=True)
class Sums:
    """A tensor as a sum of integer tensors (int64) times scales (float64, broadcastable), with its zero at 0, limited to [low, high].

    on_grid: whether it is a quantized tensor, not yet computed with.
    zero_first: whether kernels add the zero point of the output before they round; it decides sums half-way between two codes.
    """

    terms: tuple[tuple[Tensor, Tensor], ...]
    zero_first: bool = False
    on_grid: bool = False
    low: float = -math.inf
    high: float = math.inf

    @property
    def value(self) -> Tensor:
        """Real values, float64."""
        total: Any = sum(steps.double() * scale for steps, scale in self.terms)
        return total.clamp(self.low, self.high)

    @property
    def limited(self) -> bool:
        return self.low > -math.inf or self.high < math.inf

    @property
    def single(self) -> tuple[Tensor, Tensor]:
        ((steps, scale),) = self.terms
        return steps, scale


@dataclass(frozen=True)
class Looked:
    """A table of real values (float32) and the place in it (int64) of every element."""

    places: Tensor
    table: Tensor

    @property
    def value(self) -> Tensor:
        return self.table[self.places]


@dataclass(frozen=True)
class Joined:
    """Tensors to be joined along `dim` once their common grid is known."""

    parts: tuple[Any, ...]
    dim: int


class IntegerReference(fx.Interpreter):
    """Runs a converted network on integers.

    Attributes:
        codes: of the last run, int64, by the name of each quantizer.
        float_nodes: operations of the last run without an integer form.
        float_activations: activations of the last run that do more than clip and are fused with a layer.

    Args:
        converted: from `qat.convert`.
        multipliers: "float" or "fixed".

    Raises:
        QATError: not a converted network; a sum or bias that leaves int32.
        ConfigError: unknown kind of multiplier.
    """

    def __init__(self, converted: fx.GraphModule, multipliers: str = "float"):
        if not isinstance(converted, fx.GraphModule) or not getattr(converted, "meta", {}).get("converted"):
            raise QATError("IntegerReference", type(converted).__name__, "a network from qat.convert", "Call qat.convert(prepared) first.")
        check_name("multipliers", multipliers, MULTIPLIERS)
        super().__init__(converted)
        self.multipliers = multipliers
        self.called = dict(converted.named_modules(remove_duplicate=False))
        self.codes: dict[str, Tensor] = {}
        self.given: dict[str, Tensor] = {}
        self.float_nodes: list[str] = []
        self.float_activations: list[str] = []

    @torch.no_grad()
    def run_codes(self, *inputs: Tensor, given: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Codes of every activation tensor by the name of its quantizer, int64.

        Args:
            given: codes to go on with instead of those found, by the same names.
        """
        self.codes, self.float_nodes, self.float_activations, self.given = {}, [], [], given or {}
        self.run(*inputs)
        return self.codes

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        module = self.called[str(n.target)] if n.op == "call_module" else None
        first: Any = args[0] if args else None
        if n.op == "output":
            return _map(args[0], _real)
        if isinstance(module, QuantizeDequantize):
            codes = self.onto(first, module)
            self.codes[str(n.target)] = codes
            codes = self.given.get(str(n.target), codes).to(torch.int64)
            return Sums(((codes - int(module.zero_point), module.scale.double()),), on_grid=True)
        if isinstance(module, KeepFloat):
            return first
        if isinstance(module, IntegerLayer) and module.bias_scale is not None and isinstance(first, Sums):
            return self.layer(module, first)
        kind = _MODULES.get(type(module)) or arithmetic_of(n)
        result = None if kind is None or kwargs else _arithmetic(kind, *args)
        if result is not None:
            return replace(result, zero_first=type(module) in _MODULES)
        if isinstance(first, Sums):
            if is_clip_node(n, self.called):
                ends = self._call(n, (torch.tensor([-math.inf, math.inf], dtype=torch.float64), *args[1:]), kwargs).tolist()
                return replace(first, low=max(ends[0], first.low), high=min(ends[1], first.high))
            if first.on_grid and not first.limited and is_activation_node(n, self.called) and not (module and list(module.parameters())):
                return self._table(n, first, args, kwargs)
            one_scale = len(first.terms) == 1 and first.single[1].numel() == 1
            if one_scale and keeps_scale(n, self.called):
                return self._moved(n, first, args, kwargs)
            if one_scale and is_averaging_node(n, self.called):
                return self._average(n, first, args, kwargs)
        if is_concatenation_node(n) and all(isinstance(part, Sums) for part in first):
            return Joined(tuple(first), kwargs.get("dim", args[1] if len(args) > 1 else 0))
        if isinstance(first, (tuple, list)) and keeps_scale(n, self.called):
            return self._call(n, args, kwargs)
        real_args, real_kwargs = _map((args, kwargs), _real)
        if n.op not in ("placeholder", "get_attr"):
            (self.float_activations if is_activation_node(n, self.called) else self.float_nodes).append(n.name)
        return self._call(n, real_args, real_kwargs)

    def layer(self, layer: IntegerLayer, x: Sums) -> Sums:
        """Sums of products and bias, which have to fit int32."""
        codes = layer.codes.to(torch.int64)
        weight = codes.T if layer.columns else native(codes, layer.layer) if layer.turned else codes
        channels = [-1] if isinstance(layer.layer, nn.Linear) else [-1] + [1] * (codes.dim() - 2)
        with integer_kernels():
            sums = convolve(layer.layer, x.single[0], weight, None)
        sums = sums + layer.bias.to(torch.int64).view(channels)
        largest = int(sums.abs().max()) if sums.numel() else 0
        if largest >= _INT32:
            raise QATError(layer.name, f"a sum of {largest}", "sums that fit int32", "Use fewer bits, or split the layer.")
        return Sums(((sums, layer.bias_scale.double().view(channels)),))  # type: ignore[union-attr]

    def onto(self, value: Any, grid: QuantizeDequantize) -> Tensor:
        """Codes of a value on a grid, int64."""
        if isinstance(value, Joined):
            return torch.cat([self.onto(part, grid) for part in value.parts], value.dim)
        if isinstance(value, Looked):
            return self.onto(value.table, grid)[value.places]
        scale, zero, spec = grid.scale.double(), int(grid.zero_point), grid.spec
        if not isinstance(value, Sums):
            # The one place where a float becomes an integer: inputs, constants, activations, and what has no integer form.
            return ((value.float() / grid.scale).round().to(torch.float64) + zero).clamp(spec.qmin, spec.qmax).to(torch.int64)
        first, last = (zero, 0) if value.zero_first else (0, zero)
        terms = [(steps, s / scale) for steps, s in value.terms]
        codes = _fixed_point(terms, first) if self.multipliers == "fixed" else _floating_point(terms, first)
        low, high = (_code(end, float(scale), zero, spec.qmin, spec.qmax) for end in (value.low, value.high))
        return (codes + last).clamp(low, high)

    def _table(self, n: fx.Node, x: Sums, args: tuple, kwargs: dict) -> Looked:
        """The activation of every code that occurs, once."""
        steps, scale = x.single
        lowest = int(steps.min())
        codes = torch.arange(lowest, int(steps.max()) + 1)
        return Looked(steps - lowest, self._call(n, ((codes * scale).float(), *args[1:]), kwargs))

    def _moved(self, n: fx.Node, x: Sums, args: tuple, kwargs: dict) -> Any:
        steps, scale = x.single
        moved = self._call(n, (steps.double(), *args[1:]), kwargs)
        return _map(moved, lambda t: replace(x, terms=((t.to(torch.int64), scale),)) if isinstance(t, Tensor) else t)

    def _average(self, n: fx.Node, x: Sums, args: tuple, kwargs: dict) -> Sums:
        """Integer sums with the number of values in the scale; with 16 fraction bits where windows differ in their weights."""
        steps, scale = x.single
        averages = self._call(n, (steps.double(), *args[1:]), kwargs)
        count = max(1, round(steps.numel() / averages.numel()))
        if not torch.allclose(averages * count, (averages * count).round(), rtol=0, atol=1e-6):
            count = _FRACTION
        return replace(x, terms=(((averages * count).round().to(torch.int64), scale / count),))

    def _call(self, n: fx.Node, args: tuple, kwargs: dict) -> Any:
        return getattr(self, n.op)(n.target, args, kwargs)


def _arithmetic(kind: str, *operands: Any) -> Sums | None:
    """Sum, difference, product or quotient of integer tensors and numbers; None where it has no integer form."""
    if any(isinstance(x, bool) or not isinstance(x, (Sums, int, float)) or (isinstance(x, Sums) and x.limited) for x in operands):
        return None
    x, y = operands if len(operands) == 2 else (operands[0], -1)
    if kind == "div":
        kind, y = "mul", None if isinstance(y, Sums) or y == 0 else 1 / y
    if kind in ("mul", "neg"):
        x, y = (y, x) if isinstance(y, Sums) else (x, y)
        if not isinstance(x, Sums) or y is None:
            return None
        if not isinstance(y, Sums):
            return Sums(tuple((steps, scale * y) for steps, scale in x.terms))
        if len(x.terms) > 1 or len(y.terms) > 1:
            return None
        (x_steps, x_scale), (y_steps, y_scale) = x.single, y.single
        return Sums(((x_steps * y_steps, x_scale * y_scale),))
    sign = -1.0 if kind == "sub" else 1.0
    return Sums((*_terms(x), *((steps, scale * sign) for steps, scale in _terms(y))))


def _terms(x: Sums | float) -> tuple[tuple[Tensor, Tensor], ...]:
    return x.terms if isinstance(x, Sums) else ((torch.ones((), dtype=torch.int64), torch.tensor(float(x), dtype=torch.float64)),)


def _real(value: Any) -> Any:
    """Float32 values, for operations that have no integer form."""
    if isinstance(value, Joined):
        return torch.cat([_real(part) for part in value.parts], value.dim)
    return value.value.float() if isinstance(value, (Sums, Looked)) else value


def _code(end: float, scale: float, zero: int, lowest: int, highest: int) -> int:
    """Code of a limit; an infinite one is the grid's own."""
    if math.isinf(end):
        return lowest if end < 0 else highest
    return min(max(round(end / scale) + zero, lowest), highest)


def _floating_point(terms: list[tuple[Tensor, Tensor]], zero: int) -> Tensor:
    """zero + the sum of steps * M in float64, rounded half to even."""
    total: Any = sum(steps.double() * m for steps, m in terms)
    return (total + zero).round().to(torch.int64)


def _fixed_point(terms: list[tuple[Tensor, Tensor]], zero: int) -> Tensor:
    """zero + the sum of steps * M, rounded half to even, each M as an integer of 31 bits over a power of two."""
    largest = torch.stack([m.abs().max() for _, m in terms]).max()
    exponents = [torch.frexp(m)[1] for _, m in terms] if len(terms) == 1 else [torch.frexp(largest)[1]] * len(terms)
    # M = M0 2^-n with M0 up to 2^31; sums of more than one term share n, so that they can be added. n leaves room for a code of 8 bits.
    total: Any = 0
    for (steps, m), exponent in zip(terms, exponents):
        total = total + steps * torch.ldexp(m, (31 - exponent).clamp(1, 54)).round().to(torch.int64)
    shift = (31 - exponents[0].to(torch.int64)).clamp(1, 54)
    one = torch.ones_like(shift)
    half = one << (shift - 1)
    total = total + (zero * one << shift)
    rounded = (total + half) >> shift
    half_way = (total & ((one << shift) - 1)) == half
    return rounded - (half_way & (rounded & 1 == 1)).to(torch.int64)
