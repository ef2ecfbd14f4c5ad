"""Accuracy and speed of a run or of any quantized ONNX file: `python scripts/evaluate.py RUN_DIR_OR_ONNX [--data NAME --root DIR]`."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat.cli.command import add_trust, guarded, positive
from qat.deploy.runtime import RUNTIMES, Run, open_file, read_file
from qat.errors import ConfigError
from qat.train.data import SOURCES, ImageData, build_data
from qat.train.finished_run import FinishedRun, open_run


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    return guarded(lambda: evaluate(arguments))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", metavar="RUN_DIR_OR_ONNX", type=Path, help="folder of a finished run, or a file")
    parser.add_argument("--data", choices=SOURCES, help="data source (that of the run or of the file)")
    parser.add_argument("--root", help="folder or file of the data")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures at a time (%(default)s)")
    parser.add_argument("--runtime", choices=RUNTIMES, default="onnxruntime", help="; ".join(f"{k}: {v}" for k, v in RUNTIMES.items()))
    add_trust(parser)
    return parser


def evaluate(arguments: argparse.Namespace) -> int:
    positive("--batch-size", arguments.batch_size)
    run = open_run(arguments.what, arguments.trust_model) if arguments.what.is_dir() else None
    path = run.onnx if run else arguments.what
    notes = read_notes(path)
    data = data_for(arguments, run, notes)
    check_classes(path, data, notes)
    trained_for = notes.get("qat.target", "no target")
    if arguments.runtime == "openvino" and trained_for != "openvino":
        print(f"note: {path} is for {trained_for}; OpenVINO computes some networks otherwise, train with target=openvino")
    network, told = run.float_network() if run else (None, "")
    counts, seconds = count(open_file(path, arguments.runtime), network, data)
    total = counts["pictures"]
    print(f"{path} on {total} test pictures of {data.options['name']}, {arguments.runtime}")
    print(f"top-1                 {counts['top1'] / total:.4f}")
    print(f"top-5                 {counts['top5'] / total:.4f}" if data.num_classes > 5 else "top-5                 - (5 classes or fewer)")
    print(f"agreement with float  {counts['agree'] / total:.4f} ({told})" if network else "agreement with float  - (give a run folder)")
    print(f"images per second     {total / seconds:.1f} (batch {arguments.batch_size})")
    return 0


def read_notes(path: Path) -> dict[str, str]:
    """Metadata of a quantized file.

    Raises:
        QATError: no file, no ONNX, or one without scales.
    """
    model = read_file(path)
    if not any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        raise ConfigError(str(path), "an ONNX file without scales", "a quantized file", "Write one with qat.export_onnx.")
    return {prop.key: prop.value for prop in model.metadata_props}


def noted(notes: dict[str, str], key: str, default: Any) -> Any:
    """A note of the file's that is JSON, of the type of `default`, which stands for an absent one.

    Raises:
        ConfigError: something else stands there.
    """
    try:
        value = json.loads(notes[key]) if key in notes else default
    except ValueError:
        value = None
    if not isinstance(value, type(default)):
        raise ConfigError(f"note {key}", repr(notes[key][:40]), f"JSON of a {type(default).__name__}", "Export the file again.")
    return value


def data_for(arguments: argparse.Namespace, run: FinishedRun | None, notes: dict[str, str]) -> ImageData:
    """The data named on the command line, else that of the run; pictures as the file wants them.

    Raises:
        ConfigError: a file without a run, and no data named; data that cannot be used.
    """
    if run and arguments.data in (None, run.config["data"]["name"]):
        return run.data(root=arguments.root, eval_batch_size=arguments.batch_size)
    wanted = noted(notes, "qat.data", {})
    name = arguments.data or wanted.get("name")
    if name is None:
        raise ConfigError("--data", "nothing", f"the data to evaluate on: {', '.join(SOURCES)}", "Add --data NAME --root DIR.")
    shape = wanted.get("input_shape")
    options: dict[str, Any] = {"mean": wanted.get("mean"), "std": wanted.get("std"), "image_size": shape[-1] if shape else None}
    return build_data({"name": name, "root": arguments.root, "eval_batch_size": arguments.batch_size, **options}, seed=0)


def check_classes(path: Path, data: ImageData, notes: dict[str, str]) -> None:
    """Compare the names of the classes.

    Raises:
        ConfigError: the file's classes are not those of the data.
    """
    names = noted(notes, "qat.classes", [])
    own = list(map(str, data.class_names))
    if names and names != own:
        differing = next((pair for pair in zip(names, own) if pair[0] != pair[1]), None)
        found = f"{len(own)} classes" + (f", among them '{differing[1]}' for '{differing[0]}'" if differing else "")
        raise ConfigError("data", found, f"the {len(names)} classes of {path}", "Evaluate it on the data it was trained for.")


def count(opened: Run, network: nn.Module | None, data: ImageData) -> tuple[dict[str, int], float]:
    """Pictures, hits among the first and the first five, agreement with `network`; and the seconds the file took."""
    counts, seconds = dict.fromkeys(("pictures", "top1", "top5", "agree"), 0), 0.0
    for images, labels in data.test_dataloader():
        start = time.perf_counter()
        logits = torch.from_numpy(opened(images)[0])
        seconds += time.perf_counter() - start
        check_logits(logits, data)
        # Integers tie often; the first of equals wins, as argmax has it.
        ranked = logits.sort(dim=1, descending=True, stable=True).indices[:, :5]
        counts["pictures"] += len(labels)
        counts["top1"] += int((ranked[:, 0] == labels).sum())
        counts["top5"] += int((ranked == labels[:, None]).any(1).sum())
        if network is not None:
            with torch.no_grad():
                counts["agree"] += int((network(images).argmax(1) == ranked[:, 0]).sum())
    return counts, seconds


def check_logits(logits: Tensor, data: ImageData) -> None:
    """Look at the shape of the file's output.

    Raises:
        ConfigError: other than one column a class.
    """
    if logits.dim() != 2 or logits.shape[1] != data.num_classes:
        found = f"an output of shape {tuple(logits.shape)}"
        raise ConfigError("data", found, f"{data.num_classes} columns, one a class", "Evaluate the file on the data it was trained for.")
