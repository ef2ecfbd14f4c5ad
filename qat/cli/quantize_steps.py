"""The steps of `scripts/quantize.py`: chosen by the grids and the pictures, and each kept only if the network answers no worse after it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

import qat.ptq
from qat.bars import bar, waiting
from qat.cli.judge import Judge, Score
from qat.errors import QATError
from qat.graph.prepared import QuantGraph
from qat.ptq.passing import is_relu6

STEPS = ("equalize", "absorb_bias", "mse_ranges", "adaround", "correct_bias")
FEW_BITS = 4
MOST_LOST = 0.01  # of the answers, against float
LEAST_DECIBELS = 20.0
PICTURES_TO_ROUND = 256
PICTURES_TO_CORRECT = 64


@dataclass(frozen=True)
class Row:
    """One line of the table. `score` is None of a step that did not run."""

    step: str
    why: str
    seconds: float
    score: Score | None
    gained: float | None
    kept: str


@dataclass(frozen=True)
class State:
    """A float network, how it is quantized, and what came of it."""

    network: nn.Module
    config: qat.QATConfig
    prepared: QuantGraph
    warnings: tuple[str, ...]
    unrounded: QuantGraph | None = None  # before adaround


class Pipeline:
    """Runs steps one after the other and keeps a table of them.

    Args:
        network: float.
        config: grids, with min-max ranges and nearest rounding.
        calibration: batches of pictures.
        asked: "auto", or the steps to try.
        iterations: of adaround, a layer.
    """

    def __init__(
        self, network: nn.Module, config: qat.QATConfig, calibration: list[Tensor], judge: Judge, asked: str | list[str], iterations: int
    ):
        self.calibration, self.judge, self.asked, self.iterations = calibration, judge, asked, iterations
        self.pictures = sum(map(len, calibration))
        self.notes: list[str] = []
        self.rows = [Row("float", "", 0.0, judge.float_score, None, "")]
        begin = time.perf_counter()
        self.state = self._quantized(network, config, "nearest rounding")
        self.best = judge.of(self.state.prepared, "nearest rounding")
        self.rows.append(Row("nearest rounding", "where every pipeline starts", time.perf_counter() - begin, self.best, None, "kept"))

    def run(self) -> QuantGraph:
        """The network after all steps that were worth it, in eval mode."""
        makes: dict[str, dict[str, Callable[[], State]]] = {
            "equalize": self._ways_to_equalize(),
            "absorb_bias": {"": self._absorbed},
            "mse_ranges": {"": self._mse_ranges},
            "adaround": {"": self._rounded},
            "correct_bias": {"": self._corrected},
        }
        for step in STEPS:
            wanted, why = self._wanted(step)
            if wanted:
                for how, make in makes[step].items():
                    if self._try(step, why + how, make):
                        break
            elif self.asked == "auto":
                self.rows.append(Row(step, why, 0.0, None, None, "left out"))
        return self.state.prepared.eval()

    def _wanted(self, step: str) -> tuple[bool, str]:
        """(whether to try a step, why)."""
        if self.asked != "auto":
            return step in self.asked, "asked for"
        weight = self.state.config.weight
        if step in ("equalize", "absorb_bias"):
            return not weight.per_channel, "one weight scale a channel" if weight.per_channel else "one weight scale for all channels"
        if step == "mse_ranges":
            return True, "always tried"
        if step == "correct_bias":
            enough = self.pictures >= PICTURES_TO_CORRECT
            return True, f"{'empirical, with' if enough else 'analytic, with only'} {self.pictures} pictures"
        lost = self.judge.float_score.right - self.best.right
        if weight.bits > FEW_BITS and lost <= MOST_LOST and self.best.decibels >= LEAST_DECIBELS:
            return False, f"{weight.bits} bits, {lost:.2%} lost, {self.best.decibels:.1f} dB"
        why = f"{weight.bits} bits" if weight.bits <= FEW_BITS else f"{lost:.2%} lost, {self.best.decibels:.1f} dB"
        enough = self.pictures >= PICTURES_TO_ROUND
        return enough, why if enough else f"{why}, but {self.pictures} pictures of {PICTURES_TO_ROUND} it needs"

    def _try(self, step: str, why: str, make: Callable[[], State]) -> bool:
        """Whether the step was kept, or could not be taken."""
        begin = time.perf_counter()
        try:
            state = make()
        except QATError as error:
            if self.asked != "auto":
                raise
            self.rows.append(Row(step, f"{error.where}: {error.found}", time.perf_counter() - begin, None, None, "not possible"))
            return True
        score = self.judge.of(state.prepared, step)
        kept = score >= self.best
        gained = score.right - self.best.right
        self.rows.append(Row(step, why, time.perf_counter() - begin, score, gained, "kept" if kept else "taken back"))
        if kept:
            self.state, self.best = state, score
            reports = state.prepared.step_reports
            if reports and reports[-1].step.startswith(step):
                self.notes += [f"{step}: {note}" for note in reports[-1].notes]
        return kept

    def _quantized(self, network: nn.Module, config: qat.QATConfig, what: str) -> State:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            prepared = qat.prepare(network, (self.calibration[0],), config)
            qat.calibrate(prepared, bar(self.calibration, f"{what}: calibrating"))
        return State(network, config, prepared, tuple(str(item.message) for item in caught))

    def _ways_to_equalize(self) -> dict[str, Callable[[], State]]:
        """ReLU6 is replaced only where the network gains nothing with it."""
        graph = self.state.prepared  # where functions and what a BatchNorm has built in are calls of their own
        modules = dict(graph.named_modules(remove_duplicate=False))
        if not any(is_relu6(node, modules) for node in graph.graph.nodes):
            return {"": self._equalized}
        return {
            "; within ReLU6": lambda: self._equalized(within_relu6=True),
            "; ReLU for ReLU6": lambda: self._equalized(replace_relu6=True),
        }

    def _equalized(self, within_relu6: bool = False, replace_relu6: bool = False) -> State:
        with waiting("equalize"):
            example = (self.calibration[0],)
            network = qat.ptq.equalize(self.state.network, example, within_relu6=within_relu6, replace_relu6=replace_relu6)
        return self._quantized(network, self.state.config, "equalize")

    def _absorbed(self) -> State:
        with waiting("absorb_bias"):
            network = qat.ptq.absorb_bias(self.state.network, (self.calibration[0],))
        return self._quantized(network, self.state.config, "absorb_bias")

    def _mse_ranges(self) -> State:
        config = replace(self.state.config, weight_range="mse", activation_range="mse")
        return self._quantized(self.state.network, config, "mse_ranges")

    def _rounded(self) -> State:
        rounded = qat.ptq.adaround(self.state.prepared, self.calibration, iterations=self.iterations)
        return replace(self.state, prepared=rounded, unrounded=self.state.prepared)

    def _corrected(self) -> State:
        batches = self.calibration if self.pictures >= PICTURES_TO_CORRECT else None
        return replace(self.state, prepared=qat.ptq.correct_bias(self.state.prepared, batches, reference=self.state.unrounded))
