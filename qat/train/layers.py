"""What a job tells of its layers when it ends."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.functional import cross_entropy

from qat.deploy.verify import signal_to_noise
from qat.graph.prepared import QuantGraph
from qat.graph.sensitivity import layer_losses
from qat.report.layers import filter_ranges, write_layers

log = logging.getLogger(__name__)


def record_layers(
    run_dir: Path,
    history: dict[str, Any],
    network: Any,
    converted: fx.GraphModule,
    floats: nn.Module,
    pictures: list[Tensor],
    labelled: list[tuple[Tensor, Tensor]],
    device: torch.device,
) -> None:
    """Write layers.json. What fails is left out with a warning: it must not cost the result.

    Args:
        history: of the training (`Record.history`).
        network: as shipped, in evaluation, on the CPU; `converted` comes from it.
        floats: the network that quantization started from.
        pictures: batches for the noise of each tensor; without any it is left out.
        labelled: (images, labels) for the loss of each layer; likewise.
        device: on which that loss, a pass over `labelled` a layer, is computed.
    """
    sections = dict(history)
    measures: dict[str, Callable[[], Any]] = {"filters": lambda: filter_ranges(network, floats)}
    if pictures:
        measures["sqnr"] = lambda: noise(network, converted, pictures)
    if labelled:
        measures["alone"] = lambda: losses_alone(network, labelled, device)
    try:
        for name, measure in measures.items():
            try:
                sections[name] = measure()
            except Exception as error:
                log.warning("layers.json: no %s (%s: %s)", name, type(error).__name__, error, exc_info=True)
        write_layers(run_dir, sections)
    except Exception as error:
        log.warning("layers.json could not be written (%s: %s)", type(error).__name__, error, exc_info=True)


def noise(network: QuantGraph, converted: fx.GraphModule, pictures: list[Tensor]) -> dict[str, float]:
    """SQNR of every activation tensor in dB. Tensors without any noise, such as those that are always 0, are left out."""
    return {name: value for name, value in signal_to_noise(network, converted, pictures).items() if math.isfinite(value)}


def losses_alone(network: QuantGraph, labelled: list[tuple[Tensor, Tensor]], device: torch.device) -> dict[str, float]:
    """Increase of the mean cross-entropy with each layer alone quantized. The network is on the CPU again afterwards."""
    count = sum(len(labels) for _, labels in labelled)
    there = [(images.to(device), labels.to(device)) for images, labels in labelled]

    def loss(network: nn.Module) -> float:
        return sum(float(cross_entropy(network(images), labels, reduction="sum")) for images, labels in there) / count

    try:
        return {row.name: row.alone for row in layer_losses(network.to(device), loss, only="alone") if row.alone is not None}
    finally:
        network.cpu()
