"""FakeQuantizer: a module that rounds a tensor to an integer grid in training and holds the grid's scale.

Who moves its state, and when:
    range of the tensor at hand (weights)   computed on every call; training also writes it to the buffers
    running range (activations)             moves only while `training` and `observing`
    learned range (lsq)                     the optimizer's; the first training batch, or `initialize`, sets the start
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.quant.affine import fake_quantize, qparams, quantize
from qat.quant.learned import effective, gradient_scale, initial, learned_fake_quantize, mean_magnitude
from qat.quant.ranges import RANGES, minmax
from qat.quant.running import accumulate, all_finite, extent, joint, joint_mean
from qat.quant.spec import QuantSpec

LEARNED = "lsq"


class FakeQuantizer(nn.Module):
    """Tensor of any shape -> the same shape and type, on the grid of `spec`.

    Args:
        range: minmax | ema | percentile | mse | lsq.
        axis: the channel axis of a per-channel spec.
        running: True accumulates over batches (activations): minmax the extremes, the others a moving average. False takes the tensor at
            hand (weights). None is True for ema alone. For lsq it says whether axis 0 is a batch, which does not count as elements.
        momentum: weight of a new batch in the moving average, as torch's BatchNorm defines it.

    Buffers: scale and zero_point, () or (C,), at least float32 and int32 (parameters for lsq, the zero point only on an asymmetric grid);
    nonfinite_batches, batches that held NaN or Inf and were left out of the range.

    With lsq the frozen scale gets no gradient; under DDP that needs find_unused_parameters=True.

    Raises:
        QATError: unknown range; a tensor whose channels do not match the scale.
    """

    scale: Tensor
    zero_point: Tensor
    extent: Tensor
    batches: Tensor
    nonfinite_batches: Tensor

    def __init__(self, spec: QuantSpec, range: str = "minmax", *, axis: int = 0, running: bool | None = None, momentum: float = 0.01):
        super().__init__()
        if range != LEARNED and range not in RANGES:
            raise QATError("FakeQuantizer.range", repr(range), " | ".join([*RANGES, LEARNED]), "Correct the name of the range.")
        if not 0 < momentum <= 1:
            raise QATError("FakeQuantizer.momentum", repr(momentum), "a number above 0 and at most 1", "Try 0.01.")
        self.spec, self.range, self.axis, self.momentum = spec, range, axis, momentum
        self.running = range == "ema" if running is None else running
        self.name = ""
        self.enabled, self.observing = True, True
        # Kept in Python so that a frozen forward branches without reading the device.
        self._ready, self._learning = False, False
        shape = (0,) if spec.per_channel else ()
        if range == LEARNED:
            self.scale = nn.Parameter(torch.ones(shape))
        else:
            self.register_buffer("scale", torch.ones(shape))
        if range == LEARNED and not spec.symmetric:
            self.zero_point = nn.Parameter(torch.zeros(shape))
        else:
            self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("extent", torch.zeros((2, *shape)))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nonfinite_batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        if self.range == LEARNED:
            return self._forward_learned(x)
        if self._moves and self.running:
            scale, zero_point = self._observe(x)
        elif self._at_hand:
            if not self.enabled:
                return x
            scale, zero_point = self._measure(x)
        else:
            scale, zero_point = self.scale, self.zero_point
        if not self.enabled or not (self._at_hand or self.initialized):
            return x
        self._check(x)
        return fake_quantize(x, scale, zero_point, self.spec, self.axis)

    @property
    def initialized(self) -> bool:
        """Whether scale and zero_point come from data. Reads the device until the first finite batch, never again after it."""
        if not self._ready:
            self._ready = bool(self.batches > 0)
        return self._ready

    @torch.no_grad()
    def qparams_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(scale, int32 zero point) that forward would use for x, without side effects. In training on several ranks: call it on all.

        Raises:
            QATError: there is no range yet.
        """
        if self.range == LEARNED:
            if self.initialized and not (self._moves and self._follows):
                scale, zero_point = effective(self.scale, self.zero_point, self.spec)
            elif self._moves:
                scale, zero_point = effective(*self._start(x)[:2], self.spec)
            else:
                raise self._no_range()
        elif self._at_hand:
            scale, zero_point = self._range_of(x)
        elif self._moves:
            new, _, _ = self._next(x)
            scale, zero_point = qparams(-new[0], new[1], self.spec)
        elif self.initialized:
            scale, zero_point = self.scale, self.zero_point
        else:
            raise self._no_range()
        return scale.clone(), zero_point.clone()

    def codes(self, x: Tensor) -> Tensor:
        """Integers (int32, the shape of x) behind forward's output. Raises QATError when there is no range yet."""
        return quantize(x.detach(), *self.qparams_for(x), self.spec, self.axis)

    def freeze(self, x: Tensor | None = None) -> None:
        """Hold scale and zero point from here on.

        Args:
            x: for a range of the tensor at hand, the tensor whose range is held. A learned range not started yet starts from it.

        Raises:
            QATError: a range of the tensor at hand that never saw a tensor, and none given.
        """
        if x is not None and (not self.running if self.range != LEARNED else not self.initialized):
            self.initialize(x)
        if self.range != LEARNED and not self.running and not self.initialized:
            raise QATError(self.name or "FakeQuantizer", "no range to hold", "a tensor", "Call freeze(weight), or train a step first.")
        self.observing = False

    def unfreeze(self) -> None:
        self.observing = True

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        """Size the state for x and set scale and zero point from it, as the first training batch would. A non-finite x is counted only."""
        self._fit(x)
        if self.range == LEARNED:
            scale, zero_point, finite = self._start(x)
            self.scale.copy_(torch.where(finite, scale, self.scale))
            self.zero_point.copy_(torch.where(finite, zero_point, self.zero_point))
            self.batches.add_(finite)
            self.nonfinite_batches.add_(~finite)
        elif self.running:
            self._observe(x)
        else:
            self._measure(x, write=True)

    def size_for(self, channels: int) -> None:
        """Give the state the shape for so many channels; parameters stay the same objects, so an optimizer may hold them already."""
        if not self.spec.per_channel or self.scale.shape == (channels,):
            return
        # A tensor made under inference_mode could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            for key, fill in (("scale", 1.0), ("zero_point", 0.0), ("extent", 0.0)):
                old = getattr(self, key)
                self._replace(key, old.new_full((2, channels) if key == "extent" else (channels,), fill))

    def extra_repr(self) -> str:
        grid = f"{self.spec.bits} bits [{self.spec.qmin}, {self.spec.qmax}]"
        return f"{grid}, {'per channel' if self.spec.per_channel else 'per tensor'}, {self.range}{', running' if self.running else ''}"

    def get_extra_state(self) -> dict[str, bool]:
        return {"enabled": self.enabled, "observing": self.observing, "initialized": self.initialized, "learning": self._learning}

    def set_extra_state(self, state: dict[str, bool]) -> None:
        self.enabled, self.observing = state["enabled"], state["observing"]
        self._ready, self._learning = state["initialized"], state["learning"]

    @property
    def _moves(self) -> bool:
        return self.training and self.observing

    @property
    def _at_hand(self) -> bool:
        return self.range != LEARNED and not self.running and (self.observing or not self._ready)

    @property
    def _follows(self) -> bool:
        """A learned scale that has not been trained yet follows the tensor while switched off, so that a delayed start is a good start."""
        return not self.enabled and not self._learning

    def _forward_learned(self, x: Tensor) -> Tensor:
        if self._moves and (not self.initialized or self._follows):
            self.initialize(x)
        if not self.enabled or not self.initialized:
            return x
        self._check(x)
        if not self.observing:
            return fake_quantize(x, *effective(self.scale.detach(), self.zero_point.detach(), self.spec), self.spec, self.axis)
        if self.training and torch.is_grad_enabled() and not self._learning:
            self._learning = True
        elements = x.numel() // (x.shape[0] if self.running and x.dim() > 1 else 1)
        factor = gradient_scale(elements // (self.scale.numel() if self.spec.per_channel else 1), self.spec)
        return learned_fake_quantize(x, self.scale, self.zero_point, self.spec, self.axis, factor)

    def _range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return qparams(*RANGES[self.range](x.detach(), self.spec, self.axis), self.spec)

    @torch.no_grad()
    def _measure(self, x: Tensor, write: bool = False) -> tuple[Tensor, Tensor]:
        lo, hi = RANGES[self.range](x, self.spec, self.axis)
        scale, zero_point = qparams(lo, hi, self.spec)
        if write or self._moves:
            self._fit(x)
            self.scale.copy_(scale)
            self.zero_point.copy_(zero_point)
            self.nonfinite_batches.add_(~all_finite(extent(lo, hi)))
            self._ready = True
        return scale, zero_point

    @torch.no_grad()
    def _observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._fit(x)
        new, batches, finite = self._next(x)
        scale, zero_point = qparams(-new[0], new[1], self.spec)
        self.extent.copy_(new)
        self.batches.copy_(batches)
        self.nonfinite_batches.add_(~finite)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)
        return scale, zero_point

    def _next(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = joint(extent(*RANGES[self.range](x.detach(), self.spec, self.axis)))
        state = self.extent if self.extent.shape == new.shape else torch.zeros_like(new)
        return accumulate(state, self.batches, new, None if self.range == "minmax" else self.momentum)

    def _start(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach()
        magnitude, ends = mean_magnitude(x, self.spec, self.axis), extent(*minmax(x, self.spec, self.axis))
        if self.running:
            magnitude, ends = joint_mean(magnitude), joint(ends)
        return *initial(magnitude, -ends[0], ends[1], self.spec), all_finite(magnitude) & all_finite(ends)

    def _fit(self, x: Tensor) -> None:
        if self.scale.numel() == 0:
            self.size_for(x.shape[self.axis])
        self._check(x)
        if x.dtype == torch.float64 and self.scale.dtype != torch.float64 and not self.initialized:
            with torch.inference_mode(False), torch.no_grad():
                for key in ("scale", "zero_point", "extent"):
                    old = getattr(self, key)
                    self._replace(key, old.double() if old.is_floating_point() else old)

    def _check(self, x: Tensor) -> None:
        if self.spec.per_channel and self.scale.numel() not in (0, x.shape[self.axis]):
            raise QATError(
                self.name or "FakeQuantizer",
                f"{x.shape[self.axis]} channels on axis {self.axis} of {tuple(x.shape)}",
                f"{self.scale.numel()}, as at the first use",
                "Use one quantizer for each tensor, or a per-tensor QuantSpec.",
            )

    def _no_range(self) -> QATError:
        return QATError(self.name or "FakeQuantizer", "no range yet", "one finite batch seen in training mode", "Call qat.calibrate first.")

    def _replace(self, key: str, value: Tensor) -> None:
        if key in self._parameters:
            getattr(self, key).data = value
        else:
            setattr(self, key, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FakeQuantizer":
        def keep_wide(t: Tensor) -> Tensor:
            out = fn(t)
            # A half-precision scale underflows and moves the grid: take the new device, keep the type.
            return t.to(out.device) if out.dtype in (torch.float16, torch.bfloat16) else out

        return super()._apply(keep_wide, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        loaded = state_dict.get(f"{prefix}scale")
        if isinstance(loaded, Tensor) and loaded.dim() == 1:
            self.size_for(loaded.numel())
        super()._load_from_state_dict(state_dict, prefix, *args)
