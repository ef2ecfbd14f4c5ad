"""What to quantize, and how: the one argument of `prepare`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from qat.choose import check_name
from qat.errors import ConfigError
from qat.fold import STRATEGIES
from qat.quant import RANGES, QuantSpec

_RANGES = [*RANGES, "lsq"]
_LAYER_KEYS = ("weight", "activation", "skip")
_SPEC_KEYS = tuple(f.name for f in fields(QuantSpec))


def _activation_default() -> QuantSpec:
    return QuantSpec(bits=8, symmetric=False, per_channel=False)


@dataclass(frozen=True)
class QATConfig:
    """Fold strategy and quantizers of a prepared model.

    Args:
        fold: key of `qat.STRATEGIES`.
        weight: grid of every weight.
        activation: grid of every activation tensor; per tensor.
        weight_range: key of `RANGES` for weights; ranges follow the weights at hand.
        activation_range: key of `RANGES` for activations; ranges are collected over batches.
        overrides: pattern (fnmatch over qualified layer or graph node names) -> {"weight": {spec keys, "range"},
            "activation": {spec keys, "range"}, "skip": True}. Later patterns win. A skipped layer is not looked into,
            keeps its BN and gets no quantizer.
        fold_options: keyword arguments of the strategy (for example r_max of `batch_renorm`).

    Raises:
        ConfigError: unknown strategy, range or override key; per-channel activations; scale_merge with per-tensor weights.
    """

    fold: str = "bn_correction"
    weight: QuantSpec = field(default_factory=QuantSpec)
    activation: QuantSpec = field(default_factory=_activation_default)
    weight_range: str = "minmax"
    activation_range: str = "ema"
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    fold_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("QATConfig.fold", self.fold, STRATEGIES)
        check_name("QATConfig.weight_range", self.weight_range, _RANGES)
        check_name("QATConfig.activation_range", self.activation_range, _RANGES)
        if self.activation.per_channel:
            raise ConfigError("QATConfig.activation", "per_channel=True", "one scale per activation tensor", "Set per_channel=False.")
        for pattern, layer in self.overrides.items():
            for key, value in layer.items():
                check_name(f"QATConfig.overrides['{pattern}']", key, _LAYER_KEYS)
                for name in value if isinstance(value, dict) else ():
                    check_name(f"QATConfig.overrides['{pattern}']['{key}']", name, [*_SPEC_KEYS, "range"])

    def _override(self, name: str, kind: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for pattern, layer in self.overrides.items():
            if fnmatchcase(name, pattern):
                merged |= layer.get(kind, {})
        return merged

    def skips(self, name: str) -> bool:
        """Whether the layer of this qualified name is to be left exactly as it is."""
        return any(layer.get("skip", False) and fnmatchcase(name, pattern) for pattern, layer in self.overrides.items())

    def weight_for(self, name: str) -> tuple[QuantSpec, str]:
        """(grid, range name) of the weights of one layer."""
        keys = self._override(name, "weight")
        chosen = keys.pop("range", self.weight_range)
        return replace(self.weight, **keys), chosen

    def activation_for(self, *names: str) -> tuple[QuantSpec, str]:
        """(grid, range name) of the activation tensor known under `names` (graph node, layer)."""
        keys = {k: v for name in names for k, v in self._override(name, "activation").items()}
        chosen = keys.pop("range", self.activation_range)
        return replace(self.activation, **keys), chosen
