"""Which layers to keep at more bits: rules for `quant.overrides`, the run's network built again with them, and how many it takes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

import qat
from qat.errors import ConfigError
from qat.fold import FoldedConvBN
from qat.graph.kinds import WEIGHTED
from qat.graph.prepared import QuantGraph
from qat.graph.sensitivity import layer_quantizers
from qat.graph.store_float import store_float
from qat.quant import FakeQuantizer
from qat.targets import TARGETS
from qat.train.answers import Answers
from qat.train.data import ImageData
from qat.train.finished_run import FinishedRun
from qat.train.module import Classifier, float_structure, module_config
from qat.train.post_training import quantized

MOST_BITS = 8


def rules_for(prepared: QuantGraph, target: str) -> dict[str, dict[str, Any]]:
    """By layer, the rule of `quant.overrides` that gives it the most bits the target computes; a layer that has them is skipped."""
    most = TARGETS[target].weight_bits
    rules: dict[str, dict[str, Any]] = {}
    for name, quantizers in layer_quantizers(prepared).items():
        rules[name] = {}
        for quantizer in quantizers:
            part, bits = ("weight", most) if quantizer.name.endswith(".weight_quantizer") else ("activation", MOST_BITS)
            if quantizer.spec.bits < bits:
                rules[name][part] = {"bits": bits}
        rules[name] = rules[name] or {"skip": True}
    return rules


def with_rules(config: dict[str, Any], rules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The configuration with rules for layers behind its own `quant.overrides`, where they win."""
    overrides = dict(config["quant"]["overrides"])
    for name, rule in rules.items():
        overrides[_pattern(name, overrides)] = rule
    return {**config, "quant": {**config["quant"], "overrides": overrides}}


def _pattern(name: str, taken: Collection[str]) -> str:
    """A pattern that matches this name alone and is none of `taken`: the name, else with its first letter as a set, [c]onv, [cc]onv.

    Under a taken pattern the rule would stand in that one's place, in front of others that may match the layer. Taking that one out and
    writing it again behind them would let it win over them in all that the rule says nothing about. Recipes that are merged keep the
    places of their bases' patterns, so that only one of its own comes last there too.
    """
    pattern, letters = name, ""
    while pattern in taken:
        letters += name[0]
        pattern = f"[{letters}]{name[1:]}"
    return pattern


def trains(config: dict[str, Any]) -> bool:
    return config["trainer"]["max_epochs"] > 0


class Rebuilder:
    """Builds the network of a finished run again, with other rules for some layers.

    From the trained weights: prepared with the rules. Quantizers whose grid is the run's keep the ranges they were trained with, the
    others' come from calibration data. Else from the float network that the run started from, through all the steps before training: what
    a run without training ships.

    Args:
        shipped: the run's network.
        before_training: not from the trained weights; always so for a run without training.

    Raises (at the first use):
        ConfigError: the float network is asked for, and gone.
    """

    def __init__(self, run: FinishedRun, data: ImageData, shipped: QuantGraph, device: torch.device, before_training: bool = False):
        self.run, self.config, self.data, self.device = run, run.config, data, device
        self.trained = trains(run.config) and not before_training
        self._shipped = copy.deepcopy(shipped).cpu()

    @cached_property
    def start(self) -> nn.Module:
        """The float network that is prepared, on the CPU."""
        if self.trained:
            network = float_structure(module_config(self.config, self.data)).eval()
            store_float(self._shipped, network)
            return network
        network, told = self.run.float_network()
        if isinstance(network, QuantGraph):
            raise ConfigError(
                str(self.run.folder), told, "the float network it started from", "Run it again where its float_cache is kept."
            )
        return network

    def __call__(self, rules: dict[str, dict[str, Any]]) -> QuantGraph:
        return self._built(with_rules(self.config, rules))

    def plainly_rounded(self, rules: dict[str, dict[str, Any]]) -> QuantGraph | None:
        """The network with rules before the steps that fit it to its quantizers; None where the run has no such steps.

        Weights that AdaRound rounded and biases that were corrected do not become float again when the quantizers are switched off.
        """
        if self.trained or not (self.config["ptq"]["adaround"] or self.config["ptq"]["correct_bias"]):
            return None
        config = with_rules(self.config, rules)
        return self._built({**config, "ptq": {**config["ptq"], "adaround": 0, "correct_bias": None}})

    def _built(self, config: dict[str, Any]) -> QuantGraph:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ranges: the run's own log has them
            network = self._retrained(config) if self.trained else self._replayed(config)
        return network.to(self.device).eval()

    def _retrained(self, config: dict[str, Any]) -> QuantGraph:
        network: Any = Classifier(module_config(config, self.data), copy.deepcopy(self.start)).network
        qat.calibrate(network, self.data.calibration_batches(config["quant"]["calibration_batches"]))
        known = dict(self._shipped.named_modules())
        for name, module in network.named_modules():
            other: Any = known.get(name)
            if isinstance(module, FakeQuantizer) and other is not None and (other.spec, other.range) == (module.spec, module.range):
                module.load_state_dict(other.state_dict())
        return network

    def _replayed(self, config: dict[str, Any]) -> QuantGraph:
        *_, (_, module) = quantized(config, self.data, copy.deepcopy(self.start), self.device)
        network: Any = module.network.cpu()
        if config["fold"]["reestimate_before_eval"] and not trains(config):
            qat.reestimate_bn(network, self.data.calibration_batches(config["fold"]["reestimate_before_eval"]))
        return network


def weight_bytes(network: nn.Module) -> float:
    """Bytes of the weights of all layers at their bits, 32 where they are float; without scales, biases and norms."""
    total = 0.0
    inside = {id(m) for layer in network.modules() if isinstance(layer, FoldedConvBN) for m in layer.modules()}
    for module in network.modules():
        if isinstance(module, FoldedConvBN):
            quantizer = module.weight_quantizer
            total += module.weight_to_quantize().numel() * (quantizer.spec.bits if quantizer is not None else 32) / 8
        elif isinstance(module, WEIGHTED) and id(module) not in inside:
            total += module.weight.numel() * 4
    return total


@dataclass(frozen=True)
class Setting:
    """Layers with more bits, and what the network with them comes to; `step` says what was changed to get there."""

    layers: tuple[str, ...]
    answers: Answers
    bytes: float
    step: str = ""


def fewest(
    next_layer: Callable[[tuple[str, ...]], str | None],
    measure: Callable[[tuple[str, ...], str], Setting],
    goal: float,
    start: float,
) -> tuple[list[Setting], Setting | None]:
    """Few layers that bring the loss down to `goal`.

    One layer after the other is added to those before until the goal is met; where there is no next one before it is, the goal is the
    least loss met on the way. Then each but the last is left out again, the last added first, where the goal is still met without it.

    Args:
        next_layer: layers chosen so far -> the one to add; None where there is none.
        measure: (layers, step) -> what the network with more bits for them comes to.
        start: the loss with none of them.

    Returns:
        every setting measured, in order, and the one to take; None where none has a smaller loss than `start`.
    """
    tried: list[Setting] = []
    layers: tuple[str, ...] = ()
    while (name := next_layer(layers)) is not None:
        layers = (*layers, name)
        tried.append(measure(layers, f"and {name}"))
        if tried[-1].answers.loss <= goal:
            break
    best = min(tried, key=lambda setting: setting.answers.loss, default=None)
    if best is None or best.answers.loss >= start:
        return tried, None
    goal = max(goal, best.answers.loss)
    for name in reversed(best.layers[:-1]):
        tried.append(measure(tuple(other for other in best.layers if other != name), f"without {name}"))
        if tried[-1].answers.loss <= goal:
            best = tried[-1]
    return tried, best
