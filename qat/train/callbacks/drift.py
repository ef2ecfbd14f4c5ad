"""How far the statistics of the last training batch are from the running ones that inference will use."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat.fold import FoldedConvBN
from qat.graph.left_norm import LeftBatchNorm


@dataclass(frozen=True)
class LayerDrift:
    """Drift of one layer: |mu_B - mu| / sigma and |log(sigma_B / sigma)|, each as mean and maximum over channels."""

    name: str
    mean: float
    mean_max: float
    spread: float
    spread_max: float

    @property
    def size(self) -> float:
        """The larger of the two means over channels: what bounds are compared with."""
        return max(self.mean, self.spread)

    def __str__(self) -> str:
        return f"{self.name} mean {self.mean:.2f} (max {self.mean_max:.2f}) sigma {self.spread:.2f} (max {self.spread_max:.2f})"


def freezable(network: nn.Module) -> dict[str, FoldedConvBN]:
    """Folded layers whose BN is still alive, by qualified name."""
    return {name: m for name, m in network.named_modules() if isinstance(m, FoldedConvBN) and m.keeps_bn and not m.frozen}


def live_norms(network: nn.Module) -> int:
    """Number of BatchNorms whose statistics still move, folded or left in place."""
    left = sum(isinstance(m, LeftBatchNorm) and not m.frozen for m in network.modules())
    return len(freezable(network)) + left


def _pairs(network: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    drifts = {name: layer.drift() for name, layer in freezable(network).items()}
    return {name: drift for name, drift in drifts.items() if drift is not None}


def layer_drifts(network: nn.Module) -> list[LayerDrift]:
    """Drift of every layer with a live BN that has seen a batch, largest first. Reads the numbers back to the host."""
    rows = [
        LayerDrift(name, float(mean.mean()), float(mean.max()), float(spread.mean()), float(spread.max()))
        for name, (mean, spread) in _pairs(network).items()
    ]
    return sorted(rows, key=lambda row: -row.size)


def largest_drift(network: nn.Module) -> float | None:
    """Largest `LayerDrift.size` of all layers, in one read from the device; None when no layer has seen a batch."""
    sizes = [torch.maximum(mean.mean(), spread.mean()) for mean, spread in _pairs(network).values()]
    return float(torch.stack(sizes).max()) if sizes else None
