"""FakeQuantizer: a module that rounds a tensor to an integer grid in training and holds the grid's scale.

Who moves its state, and when:
    range of the tensor at hand (weights)   computed on every call; training also writes it to the buffers
    running range (activations)             moves only while `training` and `observing`
    learned range (lsq)                     the optimizer's; the first training batch, or `initialize`, sets the start
"""

import torch
from torch import Tensor

from qat.errors import QATError
from qat.quant.affine import fake_quantize, qparams, quantize, scale_for, zero_point_for
from qat.quant.learned import effective, gradient_scale, initial, learned_fake_quantize, mean_magnitude
from qat.quant.quantizer_state import QuantizerState
from qat.quant.ranges import LOGIT_RANGES, RANGES, minmax
from qat.quant.running import accumulate, all_finite, any_nonfinite, extent, joint, joint_mean
from qat.quant.spec import QuantSpec

LEARNED = "lsq"
_ESTIMATORS = {**RANGES, **LOGIT_RANGES}


class FakeQuantizer(QuantizerState):
    """Tensor of any shape -> the same shape and type, on the grid of `spec`.

    Args:
        range: minmax | ema | percentile | mse | lsq, and cross_entropy for logits (N, classes, *) with one scale.
        axis: the channel axis of a per-channel spec.
        running: True accumulates over batches (activations): minmax the extremes, the others a moving average. False takes the tensor at
            hand (weights). None is True for ema and cross_entropy. For lsq: is axis 0 a batch, which does not count as elements?
        momentum: weight of a new batch in the moving average, as torch's BatchNorm defines it.
        headroom: steps that a running range is widened by at its upper end.

    Buffers: scale and zero_point, () or (C,), at least float32 and int32 (parameters for lsq, the zero point only on an asymmetric grid);
    nonfinite_batches, batches that held NaN or Inf and were left out of the range.

    With lsq the frozen scale gets no gradient; under DDP that needs find_unused_parameters=True.

    Raises:
        QATError: unknown range; cross_entropy with one scale a channel, or on a tensor without a class axis; a tensor whose channels do
            not match the scale.
    """

    def __init__(
        self,
        spec: QuantSpec,
        range: str = "minmax",
        *,
        axis: int = 0,
        running: bool | None = None,
        momentum: float = 0.01,
        headroom: float = 0.0,
    ):
        if range != LEARNED and range not in _ESTIMATORS:
            raise QATError("FakeQuantizer.range", repr(range), " | ".join([*_ESTIMATORS, LEARNED]), "Correct the name of the range.")
        if range in LOGIT_RANGES and spec.per_channel:
            raise QATError("FakeQuantizer.range", f"{range!r} with one scale a channel", "one scale", "Write QuantSpec(per_channel=False).")
        if not 0 < momentum <= 1:
            raise QATError("FakeQuantizer.momentum", repr(momentum), "a number above 0 and at most 1", "Try 0.01.")
        super().__init__(spec, axis, learned=range == LEARNED)
        self.range, self.momentum, self.headroom = range, momentum, headroom
        self.running = range == "ema" or range in LOGIT_RANGES if running is None else running

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """
        Args:
            inplace: x has no gradient and may be overwritten.
        """
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
            if x.requires_grad and torch.is_grad_enabled() and self.observing:
                # Autograd keeps them for this gradient; a forward in training before it would move them.
                scale, zero_point = scale.clone(), zero_point.clone()
        if not self.enabled or not (self._at_hand or self.initialized):
            return x
        self._check(x)
        return fake_quantize(x, scale, zero_point, self.spec, self.axis, self.clips_nothing, inplace)

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
            scale, zero_point = self._grid_of(new)
            zero_point = zero_point.to(torch.int32)
        elif self.initialized:
            scale, zero_point = self.scale, self.zero_point
        else:
            raise self._no_range()
        return scale.clone(), zero_point.clone()

    def current_scale(self) -> Tensor:
        """Scale of the last forward, () or (C,), detached. Outside training a range of the tensor at hand leaves no trace here."""
        return (effective(self.scale, self.zero_point, self.spec)[0] if self.range == LEARNED else self.scale).detach()

    def codes(self, x: Tensor) -> Tensor:
        """Integers (int32, the shape of x) behind forward's output. Raises QATError when there is no range yet."""
        return quantize(x.detach(), *self.qparams_for(x), self.spec, self.axis)

    def freeze(self, x: Tensor | None = None) -> None:
        """Hold scale and zero point from here on.

        Args:
            x: for a range of the tensor at hand that is not held yet, the tensor whose range is. A learned range not started yet starts
                from it.

        Raises:
            QATError: a range of the tensor at hand that never saw a tensor, and none given.
        """
        if x is not None and (self._at_hand or (self.range == LEARNED and not self.initialized)):
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

    def extra_repr(self) -> str:
        grid = f"{self.spec.bits} bits [{self.spec.qmin}, {self.spec.qmax}]"
        return f"{grid}, {'per channel' if self.spec.per_channel else 'per tensor'}, {self.range}{', running' if self.running else ''}"

    @property
    def clips_nothing(self) -> bool:
        """Whether the next forward's gradient passes everywhere: the range is that of the tensor at hand, or nothing is quantized."""
        return not self.enabled or (self._at_hand and self.range == "minmax" and self.spec.symmetric)

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

    def _ends(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.range in LOGIT_RANGES and x.dim() < 2:
            found = f"a tensor of shape {tuple(x.shape)} for the range '{self.range}'"
            raise QATError(self.name or "FakeQuantizer", found, "logits (N, classes, *)", "Choose another range for it, 'mse' for example.")
        return _ESTIMATORS[self.range](x, self.spec, self.axis)

    def _range_of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return qparams(*self._ends(x.detach()), self.spec)

    @torch.no_grad()
    def _measure(self, x: Tensor, write: bool = False) -> tuple[Tensor, Tensor]:
        lo, hi = self._ends(x)
        scale, zero_point = qparams(lo, hi, self.spec)
        if write or self._moves:
            self._fit(x)
            self.scale.copy_(scale)
            if not self.spec.symmetric:
                self.zero_point.copy_(zero_point)
            self.nonfinite_batches.add_(any_nonfinite(lo + hi))
            self._ready = True
        return scale, zero_point

    @torch.no_grad()
    def _observe(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self._fit(x)
        new, batches, finite = self._next(x)
        scale, zero_point = self._grid_of(new)
        self.extent.copy_(new)
        self.batches.copy_(batches)
        self.nonfinite_batches.add_(~finite)
        self.scale.copy_(scale)
        if not self.spec.symmetric:
            self.zero_point.copy_(zero_point)
        return scale, zero_point

    def _grid_of(self, extent: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point (a whole number of any type) of a running extent, which is finite."""
        if self.headroom:
            extent = torch.stack((extent[0], extent[1] + (extent[0] + extent[1]) * (self.headroom / (self.spec.qmax - self.spec.qmin))))
        ends = extent.clamp(min=0)
        scale = scale_for(ends, self.spec)
        if not self.spec.symmetric:
            return scale, zero_point_for(ends, scale, self.spec)
        return scale, self.zero_point if self.zero_point.shape == scale.shape else torch.zeros_like(scale, dtype=torch.int32)

    def _next(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        new = joint(extent(*self._ends(x.detach())))
        state = self.extent if self.extent.shape == new.shape else torch.zeros_like(new)
        return accumulate(state, self.batches, new, None if self.range == "minmax" else self.momentum)

    def _start(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.detach()
        magnitude, ends = mean_magnitude(x, self.spec, self.axis), extent(*minmax(x, self.spec, self.axis))
        if self.running:
            magnitude, ends = joint_mean(magnitude, x.numel()), joint(ends)
        return *initial(magnitude, -ends[0], ends[1], self.spec), all_finite(magnitude) & all_finite(ends)

    def _no_range(self) -> QATError:
        return QATError(self.name or "FakeQuantizer", "no range yet", "one finite batch seen in training mode", "Call qat.calibrate first.")
