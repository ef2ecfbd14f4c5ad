"""layers.json: what happened in a run and what came of it, layer by layer. Any section may be missing.

    jitter, jitter_statistics   {"steps": [int], "layers": {layer: [share or null]}}
    ranges                      {"steps": [int], "tensors": {quantizer: {"scale_low", "scale_high", "low", "high": [number or null]}}}
    filters                     {layer: {"before": [largest |w| of each filter], "after": [the same of the folded weight]}}
    sqnr                        {quantizer: dB}
    alone                       {layer: loss with this layer alone quantized, less the unquantized loss}

Layers have their qualified names in the prepared network, as in its fold report; a quantizer of activations stands for the tensor behind
a layer and its activation. docs/report.md says how to read each.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.errors import ConfigError
from qat.fold import FoldedConvBN
from qat.fold.arithmetic import out_first
from qat.whole_file import write_whole

NAME = "layers.json"
VERSION = 1


@torch.no_grad()
def filter_ranges(network: nn.Module, floats: nn.Module) -> dict[str, dict[str, list[float]]]:
    """Largest |w| of every filter (output channel) of each layer's own weight and of its folded weight, network order.

    Args:
        network: prepared.
        floats: the float network, for the weights of layers whose BatchNorm is gone. A layer of `network` that has no like in it, as where
            calls of one layer were taken apart, has no "before".
    """
    report: Any = getattr(network, "fold_report", None)
    pairs = {layer for layer, _ in report.folded} if report is not None else set()
    like, found = dict(floats.named_modules()), dict[str, dict[str, list[float]]]()
    for name, layer in network.named_modules():
        if isinstance(layer, FoldedConvBN):
            after = _largest(out_first(layer.folded()[0], layer.conv))
            before: list[float] | None = after
            if name in pairs:
                own = layer.conv if layer.keeps_bn else like.get(name)
                weight = getattr(own, "weight", None)
                before = _largest(out_first(weight, layer.conv)) if isinstance(weight, Tensor) else None
            found[name] = {"after": after} if before is None or len(before) != len(after) else {"before": before, "after": after}
    return found


def _largest(weight: Tensor) -> list[float]:
    """Of each row of an out-first weight."""
    return weight.detach().float().abs().flatten(1).amax(1).tolist()


def rounded(value: Any) -> Any:
    """The same containers with numbers of four significant digits, and None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def write_layers(run_dir: Path, sections: dict[str, Any]) -> Path:
    """Write run_dir/layers.json, whole or not at all; sections that are empty are left out."""
    path = Path(run_dir) / NAME
    kept = {name: section for name, section in sections.items() if section and section.get("steps", True)}
    return write_whole(path, json.dumps({"version": VERSION, **rounded(kept)}, allow_nan=False, separators=(",", ":")) + "\n")


def read_layers(run_dir: Path) -> dict[str, Any]:
    """Content of layers.json of a run folder; {} where there is none.

    Raises:
        ConfigError: a file that cannot be read, or of another version.
    """
    path = Path(run_dir) / NAME
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"a file that cannot be read ({error})", "the layers of a run", "Remove it.") from error
    if not isinstance(found, dict) or found.get("version") != VERSION:
        version = found.get("version") if isinstance(found, dict) else type(found).__name__
        raise ConfigError(str(path), f"version {version!r}", f"version {VERSION}", "Remove it, or read it with the qat that wrote it.")
    return found
