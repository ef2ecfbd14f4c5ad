"""What to quantize, and how: the one argument of `prepare`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from qat.choose import check_name
from qat.errors import ConfigError, QATError
from qat.fold import STRATEGIES
from qat.fold.strategies import strategy_options
from qat.quant import LOGIT_RANGES, RANGES, QuantSpec
from qat.targets import TARGETS

_RANGES = [*RANGES, "lsq"]
_LAYER_KEYS = ("weight", "activation", "skip", "leaf")
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
        weight_range: minmax | percentile | mse | lsq; all but the last follow the weights at hand.
        activation_range: ema | minmax | percentile | mse | lsq; all but the last are collected over batches.
        overrides: pattern (fnmatch over qualified layer or graph node names) -> {"weight": {spec keys, "range"},
            "activation": {spec keys, "range"}, "skip": True, "leaf": True}. Later patterns win. A skipped layer is not looked into,
            keeps its BN and gets no quantizer. A leaf is not looked into either and computes in float, but its input and its output
            are quantized as those of any operation. The activation range cross_entropy is for the layer that gives the logits.
        fold_options: keyword arguments of the strategy (for example r_max of `batch_renorm`).
        target: key of `TARGETS`, the machine the network is trained for; None for no particular one. See `for_target`.

    Raises:
        ConfigError: unknown strategy, range, target or override key; an override of another form; per-channel activations; asymmetric
            weights; grids that the target cannot compute.
    """

    fold: str = "bn_correction"
    weight: QuantSpec = field(default_factory=QuantSpec)
    activation: QuantSpec = field(default_factory=_activation_default)
    weight_range: str = "minmax"
    activation_range: str = "ema"
    overrides: dict[str, dict[str, Any]] = field(default_factory=dict)
    fold_options: dict[str, Any] = field(default_factory=dict)
    target: str | None = None

    @classmethod
    def for_target(cls, target: str, **chosen: Any) -> QATConfig:
        """The configuration whose grids suit a target where `chosen` does not say otherwise.

        Raises:
            ConfigError: as the constructor.
        """
        check_name("QATConfig.target", target, TARGETS)
        for key in chosen:
            check_name("QATConfig", key, [f.name for f in fields(cls)])
        signed = TARGETS[target].symmetric_activations
        grids = {
            "weight": QuantSpec(bits=TARGETS[target].weight_bits),
            "activation": QuantSpec(symmetric=signed, per_channel=False, narrow=False),
        }
        return cls(**{**grids, **chosen, "target": target})

    def __post_init__(self) -> None:
        check_name("QATConfig.fold", self.fold, STRATEGIES)
        for key in ("weight", "activation"):
            _refuse_logit_range(f"QATConfig.{key}_range", getattr(self, f"{key}_range"))
            check_name(f"QATConfig.{key}_range", getattr(self, f"{key}_range"), _RANGES)
        for key in ("weight", "activation"):
            if not isinstance(getattr(self, key), QuantSpec):
                raise ConfigError(f"QATConfig.{key}", repr(getattr(self, key)), "a QuantSpec", f"Write {key}=qat.QuantSpec(bits=8).")
        if not isinstance(self.fold_options, dict):
            raise ConfigError("QATConfig.fold_options", repr(self.fold_options), "a mapping", "Write {} for none.")
        if self.activation.per_channel:
            raise ConfigError("QATConfig.activation", "per_channel=True", "one scale per activation tensor", "Set per_channel=False.")
        if not self.weight.symmetric:
            raise ConfigError("QATConfig.weight", "symmetric=False", "a symmetric grid, which integer layers need", "Set symmetric=True.")
        if self.fold == "scale_merge" and self.weight.power_of_two:
            expected = "a strategy that does not multiply scales by gamma / sigma"
            raise ConfigError("QATConfig.weight", "power_of_two=True with fold='scale_merge'", expected, "Use another fold.")
        known = strategy_options(self.fold)
        for option in self.fold_options:
            if option not in known:
                takes = " | ".join(known) or f"none: '{self.fold}' has no options"
                raise ConfigError(f"QATConfig.fold_options['{option}']", "an unknown option", takes, "Remove or correct it.")
        if not isinstance(self.overrides, dict):
            raise ConfigError("QATConfig.overrides", repr(self.overrides), "a mapping of patterns", "Write {} for none.")
        for pattern, layer in self.overrides.items():
            _check_override(f"QATConfig.overrides['{pattern}']", layer)
        if self.target is not None:
            check_name("QATConfig.target", self.target, TARGETS)
            layers = list(self.overrides.values())
            bits = max([self.weight.bits, *(layer.get("weight", {}).get("bits", 0) for layer in layers)])
            symmetric = self.activation.symmetric and all(layer.get("activation", {}).get("symmetric", True) for layer in layers)
            if problem := TARGETS[self.target].problem(bits, symmetric):
                todo = f"Use QATConfig.for_target('{self.target}'), or another target."
                raise ConfigError(f"QATConfig.target '{self.target}'", *problem, todo)

    def _override(self, names: tuple[str, ...], kind: str) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for pattern, layer in self.overrides.items():
            if any(fnmatchcase(name, pattern) for name in names):
                merged |= layer.get(kind, {})
        return merged

    def skips(self, name: str) -> bool:
        """Whether the layer of this qualified name is to be left exactly as it is."""
        return self._says(name, "skip")

    def keeps_whole(self, name: str) -> bool:
        """Whether the layer of this qualified name, skipped or a leaf, is not looked into and stays float."""
        return self._says(name, "skip") or self._says(name, "leaf")

    def _says(self, name: str, key: str) -> bool:
        said = [layer[key] for pattern, layer in self.overrides.items() if key in layer and fnmatchcase(name, pattern)]
        return bool(said) and said[-1]

    def weight_for(self, name: str) -> tuple[QuantSpec, str]:
        """(grid, range name) of the weights of one layer."""
        keys = self._override((name,), "weight")
        chosen = keys.pop("range", self.weight_range)
        return replace(self.weight, **keys), chosen

    def activation_for(self, *names: str) -> tuple[QuantSpec, str]:
        """(grid, range name) of the activation tensor known under `names` (graph node, layer)."""
        keys = self._override(names, "activation")
        chosen = keys.pop("range", self.activation_range)
        return replace(self.activation, **keys), chosen


def _check_override(where: str, layer: Any) -> None:
    """Raise ConfigError unless `layer` is {"skip": bool, "leaf": bool, "weight": {...}, "activation": {...}} or a part of it."""
    todo = "Write {'weight': {'bits': 4}}, {'skip': True} or {'leaf': True}."
    if not isinstance(layer, dict):
        raise ConfigError(where, repr(layer), "a mapping", todo)
    for key, value in layer.items():
        check_name(where, key, _LAYER_KEYS)
        if key in ("skip", "leaf"):
            if not isinstance(value, bool):
                raise ConfigError(f"{where}['{key}']", repr(value), "true or false", todo)
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{where}['{key}']", repr(value), "a mapping", todo)
        for name in value:
            check_name(f"{where}['{key}']", name, [*_SPEC_KEYS, "range"])
        try:
            QuantSpec(**{name: given for name, given in value.items() if name != "range"})
        except QATError as error:
            raise ConfigError(f"{where}['{key}'].{error.where.split('.')[-1]}", error.found, error.expected, error.todo) from None
        if key == "weight" and value.get("symmetric") is False:
            raise ConfigError(f"{where}['weight']", "symmetric=False", "a symmetric grid, which integer layers need", "Remove it.")
        if key == "activation" and value.get("per_channel") is True:
            raise ConfigError(f"{where}['activation']", "per_channel=True", "one scale per activation tensor", "Remove it.")
        if "range" in value:
            if key == "weight":
                _refuse_logit_range(f"{where}['weight'].range", value["range"])
            check_name(f"{where}['{key}'].range", value["range"], _RANGES if key == "weight" else [*_RANGES, *LOGIT_RANGES])


def _refuse_logit_range(where: str, name: Any) -> None:
    if name in list(LOGIT_RANGES):
        todo = f"Write overrides={{'classifier': {{'activation': {{'range': '{name}'}}}}}}."
        raise ConfigError(where, repr(name), "a range of any tensor; this one is for the activation that holds the logits", todo)
