"""What a fake quantizer remembers: shapes, types, switches, and how they survive checkpoints, copies and conversions."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Self

import torch
from torch import Tensor, nn

from qat.errors import QATError
from qat.quant.spec import QuantSpec


class QuantizerState(nn.Module):
    """Scale, zero point and running extent of one quantizer, with the switches `enabled` and `observing`.

    Buffers: scale and zero_point, () or (C,), at least float32 and int32 (with `learned` parameters, the zero point only on an asymmetric
    grid); extent, (2,) or (2, C), the running (-lo, hi); batches, the finite batches seen; nonfinite_batches, those that held NaN or Inf.
    A per-channel state has no channels until the first use, `size_for`, or a checkpoint gives their number.
    """

    scale: Tensor
    zero_point: Tensor
    extent: Tensor
    batches: Tensor
    nonfinite_batches: Tensor

    def __init__(self, spec: QuantSpec, axis: int, learned: bool):
        super().__init__()
        self.spec, self.axis = spec, axis
        self.name = ""
        self.enabled, self.observing = True, True
        # Kept in Python so that a frozen forward branches without reading the device.
        self._ready, self._learning = False, False
        shape = (0,) if spec.per_channel else ()
        if learned:
            self.scale = nn.Parameter(torch.ones(shape))
        else:
            self.register_buffer("scale", torch.ones(shape))
        if learned and not spec.symmetric:
            self.zero_point = nn.Parameter(torch.zeros(shape))
        else:
            self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32))
        self.register_buffer("extent", torch.zeros((2, *shape)))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nonfinite_batches", torch.zeros((), dtype=torch.int64))

    @property
    def initialized(self) -> bool:
        """Whether scale and zero_point come from data. Reads the device until the first finite batch, never again after it."""
        if not self._ready:
            self._ready = bool(self.batches > 0)
        return self._ready

    def size_for(self, channels: int) -> None:
        """Give the state the shape for so many channels; parameters stay the same objects, so an optimizer may hold them already."""
        if not self.spec.per_channel or self.scale.shape == (channels,):
            return
        # A tensor made under inference_mode could not be trained with later.
        with torch.inference_mode(False), torch.no_grad():
            for key, fill in (("scale", 1.0), ("zero_point", 0.0), ("extent", 0.0)):
                old = getattr(self, key)
                self._replace(key, old.new_full((2, channels) if key == "extent" else (channels,), fill))

    def get_extra_state(self) -> Tensor:
        """Switches and grid as one tensor, so that averages of weights, which walk over a state dict's tensors, find nothing else."""
        switches = (self.enabled, self.observing, self.initialized, self._learning)
        return torch.tensor([*switches, *self._grid()], dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        """
        Raises:
            QATError: the state of a quantizer of another grid.
        """
        enabled, observing, ready, learning, *grid = state.tolist()
        if grid != self._grid():
            found = QuantSpec(grid[0], *map(bool, grid[1:]))
            todo = "Prepare the network with the grids of the checkpoint."
            raise QATError(self.name or "FakeQuantizer", f"the state of a {found}", f"that of a {self.spec}", todo)
        self.enabled, self.observing = bool(enabled), bool(observing)
        self._ready, self._learning = bool(ready), bool(learning)

    def _grid(self) -> list[int]:
        return [int(getattr(self.spec, field.name)) for field in fields(QuantSpec)]

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

    def _replace(self, key: str, value: Tensor) -> None:
        if key in self._parameters:
            getattr(self, key).data = value
        else:
            setattr(self, key, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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
