"""A float network and a folder of pictures -> an integer ONNX file, without training: `python scripts/quantize.py MODEL --data FOLDER`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

import qat
from qat.bars import waiting
from qat.choose import check_name
from qat.cli.command import OK, add_trust, guarded, positive, print_wide
from qat.cli.judge import Judge
from qat.cli.quantize_data import Folder, decoded, read_folder
from qat.cli.quantize_model import FloatModel, checked, float_model
from qat.cli.quantize_steps import STEPS, Pipeline, Row
from qat.deploy.runtime import predict
from qat.errors import ConfigError
from qat.graph.prepared import QuantGraph
from qat.targets import TARGETS

_PARITY_BATCHES = 2
_PARITY_BOUND = 1  # LSB


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 (bad input) or 130 (stopped by the user; no file is written then).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    return guarded(lambda: quantize(arguments))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    named = "a name of timm's, torchvision:NAME, package.module:function, a run folder, or a file of a whole network"
    parser.add_argument("model", metavar="MODEL", help=named)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="train/ and val/ of class folders, class folders, or pictures")
    targets = "; ".join(f"{name}: {target.what}" for name, target in TARGETS.items())
    parser.add_argument("--target", default="ort_vnni", help=f"where the file is to run (%(default)s); {targets}")
    parser.add_argument("--checkpoint", metavar="FILE", help="weights of a named network, .pth or .safetensors; nothing is downloaded")
    parser.add_argument("--out", type=Path, default=Path("model.onnx"), help="file to write (%(default)s)")
    parser.add_argument("--image-size", type=int, help="height and width of a picture (what the network was made for)")
    parser.add_argument("--mean", type=float, nargs="+", help="of pixels in [0, 1], one number or one a channel (the network's own)")
    parser.add_argument("--std", type=float, nargs="+", help="the same")
    parser.add_argument("--pictures", type=int, default=512, help="half of them to calibrate on, half to measure on (%(default)s)")
    parser.add_argument("--weight-bits", type=int, help="2 to 8 (the most that the target computes)")
    parser.add_argument("--per-tensor", action="store_true", help="one weight scale a layer instead of one a channel")
    told = f"auto, none, or some of {','.join(STEPS)} (%(default)s); a step that makes the answers worse is taken back"
    parser.add_argument("--steps", default="auto", help=told)
    parser.add_argument("--iterations", type=int, default=1000, help="of adaround, a layer (%(default)s)")
    parser.add_argument("--trust-file", action="store_true", help="MODEL is a pickled network of yours: loading it runs code in it")
    add_trust(parser)
    return parser


def quantize(arguments: argparse.Namespace) -> int:
    """Raise what is wrong before any work, choose and run the steps, write the file."""
    asked, config = check(arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = float_model(arguments.model, arguments.checkpoint, arguments.trust_file, arguments.trust_model)
        model = checked(model, arguments.image_size, arguments.mean, arguments.std)
        qat.prepare(model.network, (torch.zeros(2, *model.shape),), config)  # a network that cannot be captured is refused before any work
        mode = "RGB" if model.shape[0] == 3 else "L"
        folder = read_folder(arguments.data, model.shape[-1], mode, arguments.pictures)
        calibration = decoded(folder.calibration, model.mean, model.std, "reading pictures")
        measured = decoded(folder.measured, model.mean, model.std, "reading pictures")
        labelled = len(folder.class_names) == model.classes
        print_start(arguments, model, folder, labelled)
        judge = Judge(model.network, measured, folder.measured.labels if labelled else None)
        pipeline = Pipeline(model.network, config, calibration, judge, asked, arguments.iterations)
        network = pipeline.run()
        steps = [row.step for row in pipeline.rows if row.kept == "kept"]
        parity = write(network, arguments, measured, notes_of(arguments.model, model, folder if labelled else None, steps))
    score = judge.of_logits(predict(arguments.out, measured))
    pipeline.rows.append(Row("integers", "the file in onnxruntime", 0.0, score, score.right - pipeline.best.right, ""))
    print_rows(pipeline.rows, labelled)
    told = dict.fromkeys([*pipeline.state.warnings, *(str(item.message) for item in caught)])
    for line in [*(f"note: {note}" for note in pipeline.notes), *(f"warning: {warning}" for warning in told)]:
        print(line, file=sys.stderr)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.2f} MB for {arguments.target}; {parity}")
    return OK


def check(arguments: argparse.Namespace) -> tuple[str | list[str], qat.QATConfig]:
    """The steps asked for, and the grids.

    Raises:
        ConfigError: an option that makes no sense, alone or for the target.
    """
    target = TARGETS[check_name("--target", arguments.target, TARGETS)]
    for option in ("pictures", "iterations"):
        positive(f"--{option}", getattr(arguments, option))
    if arguments.image_size is not None:
        positive("--image-size", arguments.image_size)
    bits = target.weight_bits if arguments.weight_bits is None else arguments.weight_bits
    if not 2 <= bits <= target.weight_bits:
        told = f"from 2 to {target.weight_bits}, as {arguments.target} computes them"
        raise ConfigError("--weight-bits", str(bits), told, "Leave it out, or choose another --target.")
    asked: str | list[str] = "auto"
    if arguments.steps != "auto":
        asked = [] if arguments.steps == "none" else [step.strip() for step in arguments.steps.split(",")]
        for step in asked:
            check_name("--steps", step, STEPS if len(asked) > 1 else ("auto", "none", *STEPS))
    if arguments.out.exists():
        raise ConfigError("--out", f"{arguments.out}, which is there already", "a new file", "Remove it, or give another name.")
    if not arguments.out.parent.is_dir():
        raise ConfigError("--out", str(arguments.out), "a file in a folder that exists", f"Make {arguments.out.parent} first.")
    weight = qat.QuantSpec(bits=bits, per_channel=not arguments.per_tensor)
    return asked, qat.QATConfig.for_target(arguments.target, fold="static", weight=weight)


def notes_of(word: str, model: FloatModel, classes: Folder | None, steps: list[str]) -> dict[str, str]:
    """Metadata of the file, under the names that a run's file has; nothing of the machine it was made on."""
    name = word if not Path(word).exists() else Path(word).name
    data = {"name": model.data, "input_shape": list(model.shape), "mean": model.mean, "std": model.std}
    notes = {
        "qat.model": name,
        "qat.scales": f"post-training quantization; steps {json.dumps(steps)}",
        "qat.data": json.dumps(data),
    }
    return notes if classes is None else {**notes, "qat.classes": json.dumps(classes.class_names)}


def write(network: QuantGraph, arguments: argparse.Namespace, pictures: list[Tensor], notes: dict[str, str]) -> str:
    """Write the file once it was compared with the network; what the comparison says."""
    part = arguments.out.with_name(f".{arguments.out.name}.part")
    try:
        with waiting("writing the file"):
            converted = qat.convert(network)
            qat.export_onnx(converted, (pictures[0][:1],), part, target=arguments.target, notes=notes)
            some = pictures[:_PARITY_BATCHES]
            parity = qat.verify(converted, part, some)
        os.replace(part, arguments.out)
    finally:
        part.unlink(missing_ok=True)
    if parity.max_lsb > _PARITY_BOUND:
        first = next(tensor.name for tensor in parity.tensors if tensor.max_lsb > _PARITY_BOUND)
        warnings.warn(f"the file and convert() lie up to {parity.max_lsb} LSB apart, first at {first}", stacklevel=2)
    told = f"{parity.identical:.4%} of its integers are those of convert(), at most {parity.max_lsb} LSB apart"
    return f"{told}, on {sum(map(len, some))} pictures"


def print_start(arguments: argparse.Namespace, model: FloatModel, folder: Folder, labelled: bool) -> None:
    """What is quantized, on what, and how it is measured."""
    size = "x".join(map(str, model.shape))
    print(f"{arguments.model}: pictures {size}, mean {numbers(model.mean)}, std {numbers(model.std)}; {model.classes} classes")
    counts = f"{len(folder.calibration.labels)} to calibrate on, {len(folder.measured.labels)} to measure on"
    print(f"{arguments.data}: {folder.told}, {counts}")
    if labelled:
        print("measured: top-1")
    else:
        had = f"{len(folder.class_names)} class folders for {model.classes} classes" if folder.class_names else "no class folders"
        print(f"measured: agreement with the float network ({had})")


def numbers(values: list[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


def print_rows(rows: list[Row], labelled: bool) -> None:
    """The table of the steps."""
    table = Table("step", box=None, pad_edge=False, header_style="bold")
    for heading in ("seconds", "top-1" if labelled else "agreement", "SQNR dB", "gain"):
        table.add_column(heading, justify="right")
    table.add_column("")
    table.add_column("why")
    for row in rows:
        right, decibels = ("-", "-") if row.score is None else (f"{row.score.right:.4f}", shown(row.score.decibels))
        gained = "" if row.gained is None else f"{row.gained:+.4f}"
        table.add_row(row.step, f"{row.seconds:.1f}" if row.seconds else "", right, decibels, gained, row.kept, row.why)
    print_wide(table, 160)


def shown(decibels: float) -> str:
    return "-" if math.isinf(decibels) else f"{decibels:.1f}"
