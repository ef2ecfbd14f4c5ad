"""What a job does between its float network and training: plain rounding, then the post-training steps of its recipe."""

import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from pytorch_lightning import seed_everything
from torch import Tensor, nn

import qat.ptq
from qat.graph.prepared import QuantGraph
from qat.train.data import ImageData
from qat.train.float_steps import float_steps
from qat.train.module import Classifier, module_config

SAID = {"ptq": "post-training quantization", "range_search": "weight ranges chosen by the network's output"}

log = logging.getLogger(__name__)


def quantized(config: dict[str, Any], data: ImageData, network: nn.Module, device: torch.device) -> Iterator[tuple[str, Classifier]]:
    """(step, module after it) of everything between the float network and training: plain rounding, then the steps of the recipe."""

    def calibrated(network: nn.Module) -> Classifier:
        # seeded again: the numbers below do not depend on whether the float network was trained here or found
        seed_everything(config["seed"], workers=True, verbose=False)
        module = Classifier(module_config(config, data), network.cpu())
        qat.calibrate(module.network, data.calibration_batches(config["quant"]["calibration_batches"]))
        return module

    module = calibrated(network)
    log.info("%s", module.network.fold_report)
    yield "ptq", module
    example = data.calibration_batches(1)[0]
    for step, changed in float_steps(network.cpu(), example, config["ptq"], config["quant"]["overrides"]):
        log.info("%s", changed.step_reports[-1])
        module = calibrated(changed)
        yield step, module
    if config["quant"]["range_search"]:
        pictures = [images.to(device) for images in data.calibration_batches(config["quant"]["range_search"])]
        qat.search_weight_ranges(module.network.to(device), pictures)
        yield "range_search", module
    rounded: Any = module.network.to(device)
    for step, prepared in prepared_steps(rounded, data, config["ptq"], config["seed"]):
        log.info("%s", prepared.step_reports[-1])
        module.network = prepared
        yield step, module


def prepared_steps(prepared: QuantGraph, data: ImageData, ptq: dict[str, Any], seed: int) -> Iterator[tuple[str, QuantGraph]]:
    """(step, calibrated network after it) of every step that `ptq` asks for."""
    if not (ptq["adaround"] or ptq["correct_bias"]):
        return
    device = next(prepared.parameters()).device
    batches, unrounded = [images.to(device) for images in first_pictures(data, ptq["pictures"])], prepared
    if ptq["adaround"]:
        prepared = qat.ptq.adaround(prepared, batches, iterations=ptq["adaround"], seed=seed)
        yield "adaround", prepared
    if ptq["correct_bias"]:
        measured = batches if ptq["correct_bias"] == "empirical" else None
        yield "correct_bias", qat.ptq.correct_bias(prepared, measured, method=ptq["correct_bias"], reference=unrounded)


def first_pictures(data: ImageData, count: int) -> list[Tensor]:
    """`count` training pictures without augmentation, in batches; all there are, where there are fewer."""
    batches = data.calibration_batches(math.ceil(count / data.options["batch_size"]))
    if (extra := sum(map(len, batches)) - count) > 0:
        batches[-1] = batches[-1][:-extra]
    return batches
