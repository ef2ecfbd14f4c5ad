"""A BatchNorm that stays in the network, with the freezing and pooling a folded one has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qat.fold.base import built_in_activation
from qat.fold.batch_norm import normalise
from qat.fold.foldable import FROZEN_NORMS, has_hooks, has_known_forward
from qat.fold.joint import is_joint
from qat.fold.statistics import Pool, batch_statistics, move_running, require_several_values, write_pooled


class LeftBatchNorm(nn.Module):
    """Wraps a BatchNorm that cannot be folded; `frozen` survives train(), checkpoints and deepcopy.

    In training on several ranks it normalises with the statistics of the joint batch, as folded layers do; one with hooks or a forward of
    its own is called as it is.

    Side effects: between `start_pooling` and `finish_pooling` batch statistics are pooled (law of total variance) and the
    running ones rest.
    """

    bn: Any

    def __init__(self, bn: nn.Module, name: str = ""):
        super().__init__()
        self.bn = bn
        self.name = name
        self.always_frozen = isinstance(bn, FROZEN_NORMS)
        self.frozen = self.always_frozen
        self._pool: Pool | None = None

    def train(self, mode: bool = True) -> LeftBatchNorm:
        super().train(mode)
        if self.frozen:
            self.bn.eval()
        return self

    def freeze(self) -> None:
        self.frozen = True
        self.bn.eval()

    def start_pooling(self) -> None:
        self._pool = None if isinstance(self.bn, FROZEN_NORMS) or self.bn.running_mean is None else Pool()

    def finish_pooling(self) -> None:
        write_pooled(self._pool, self.bn)
        self._pool = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bn.training and self._normalises_jointly:
            return self._joint_forward(x)
        if self.bn.training and has_known_forward(self.bn) and not self.always_frozen:
            require_several_values(x, name=self.name)
        if self._pool is None:
            return self.bn(x)
        with torch.no_grad():
            self._pool.add(*batch_statistics(x, name=self.name))
        kept = {k: v.clone() for k, v in self.bn.named_buffers()}
        y = self.bn(x)
        with torch.no_grad():
            for key, value in self.bn.named_buffers():
                value.copy_(kept[key])
        return y

    @property
    def _group(self) -> Any:
        return getattr(self.bn, "process_group", None)

    @property
    def _normalises_jointly(self) -> bool:
        return is_joint(self._group) and not self.always_frozen and has_known_forward(self.bn) and not has_hooks(self.bn)

    def _joint_forward(self, x: torch.Tensor) -> torch.Tensor:
        bn = self.bn
        gamma = x.new_ones(bn.num_features) if bn.weight is None else bn.weight
        beta = x.new_zeros(bn.num_features) if bn.bias is None else bn.bias
        y, mean, var, count = normalise(x, gamma, beta, bn.eps, self.name, self._group)
        if self._pool is not None:
            self._pool.add(mean, var, count)
        elif bn.running_mean is not None:
            move_running(bn, mean, var, count)
        return built_in_activation(bn)(y)

    def get_extra_state(self) -> torch.Tensor:
        """Whether the statistics rest; a tensor, as averages of weights expect of all that a state dict holds."""
        return torch.tensor(self.frozen)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.frozen = bool(state) or self.always_frozen
        self.bn.train(self.training and not self.frozen)
