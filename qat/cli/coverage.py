"""What happens to the networks people bring: `python scripts/coverage.py [NAME ...]`.

Each network, with random weights and random BatchNorm statistics, is folded, prepared, trained one step, calibrated, converted, exported
and compared with its file in onnxruntime. A process each, so that one cannot take the others down.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.progress import Progress

from qat.choose import check_name
from qat.cli.command import FAILED, OK, guarded, positive
from qat.cli.coverage_models import MODELS, input_size
from qat.errors import ConfigError

CLASSES = 10
BATCH = 4
# Float outputs before and after folding: largest difference over the largest output.
FOLD_BOUND = 1e-3
# Integers of the file that are those of convert(), every tensor computed from the same ones, and no difference above 1 LSB.
PARITY_BOUND = 0.999
SECONDS = 400


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (a network failed) or 2 (bad input).

    Args:
        argv: the command line after the program's name.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"SOURCE:MODEL (all {len(MODELS)} that are known to have BatchNorms)")
    parser.add_argument("--processes", type=int, default=2, help="networks at a time (%(default)s)")
    parser.add_argument("--output", type=Path, help="folder for coverage.json and coverage.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(examine(arguments.one)))
        return OK
    return guarded(lambda: cover(arguments))


def cover(arguments: argparse.Namespace) -> int:
    names = [known(name) for name in arguments.names] or MODELS
    with Progress() as progress, ThreadPoolExecutor(positive("--processes", arguments.processes)) as pool:
        bar = progress.add_task("networks", total=len(names))
        rows = []
        for row in pool.map(apart, names):
            rows.append(row)
            progress.advance(bar)
            progress.console.print(line(row), highlight=False, markup=False, soft_wrap=True)
    passed = sum(not row.get("failed") for row in rows)
    print(f"{passed} of {len(rows)} networks pass ({passed / len(rows):.1%})")
    if arguments.output:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "coverage.json").write_text(json.dumps(rows, indent=1) + "\n")
        (arguments.output / "coverage.md").write_text(as_markdown(rows, passed))
    return OK if passed == len(rows) else FAILED


def known(name: str) -> str:
    """The name itself, when its source has such a network.

    Raises:
        ConfigError: another form than SOURCE:MODEL, or an unknown network.
    """
    import timm
    import torchvision

    listed = {"timm": timm.list_models, "torchvision": torchvision.models.list_models}
    source, _, model = name.partition(":")
    if source not in listed:
        raise ConfigError("NAME", repr(name), "timm:MODEL or torchvision:MODEL", f"Write for example timm:{name}.")
    check_name("NAME", model, listed[source]())
    return name


def apart(name: str) -> dict[str, Any]:
    """`examine` in a process of its own, of one thread."""
    command = [sys.executable, "-c", f"from qat.cli.coverage import main; main(['--one', {name!r}])"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
    except subprocess.TimeoutExpired:
        return {"name": name, "failed": f"not done in {SECONDS} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        return {"name": name, "failed": f"the process ended with {done.returncode}: {said[-1][:200] if said else ''}"}


def examine(name: str) -> dict[str, Any]:
    """One network through all steps; the row of the table, with the step and the reason where one failed."""
    import timm
    import torch
    import torchvision

    import qat

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    row: dict[str, Any] = {"name": name}
    step = "build"
    try:
        source, _, model_name = name.partition(":")
        build = timm.create_model if source == "timm" else torchvision.models.get_model
        model = build(model_name, num_classes=CLASSES)
        randomise_statistics(model)
        size = input_size(name)
        x = torch.randn(BATCH, 3, size, size)
        step = "fold"
        model.eval()
        report = qat.fold(model, (x,)).fold_report
        row |= {"folded": len(report.folded), "left": dict(Counter(reason for _, reason in report.left)), "size": size}
        row["fold_error"] = difference = fold_error(model, x)
        if not difference <= FOLD_BOUND:
            return {**row, "failed": f"fold: outputs differ by {difference:.1e} of the largest"}
        step = "prepare"
        prepared = qat.prepare(model.train(), (x,))
        step = "train"
        optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-6)
        output = prepared(x)
        loss = torch.nn.functional.cross_entropy(output[0] if isinstance(output, tuple) else output, torch.arange(BATCH) % CLASSES)
        loss.backward()
        optimizer.step()
        if not bool(torch.isfinite(loss)):
            return {**row, "failed": "train: the loss is not finite"}
        step = "calibrate"
        qat.calibrate(prepared, [x])
        step = "convert"
        converted = qat.convert(prepared.eval())
        step = "export"
        with TemporaryDirectory() as place:
            path = qat.export_onnx(converted, (x,), Path(place) / "m.onnx")
            step = "parity"
            parity = qat.verify(converted, path, [x], stepwise=True)
            row |= {"identical": parity.identical, "max_lsb": parity.max_lsb, "as_a_whole": qat.verify(converted, path, [x]).identical}
        if parity.identical < PARITY_BOUND or parity.max_lsb > 1:
            return {**row, "failed": f"parity: {parity.identical:.4%} of the integers are identical, {parity.max_lsb} LSB"}
    except Exception as error:
        return {**row, "failed": f"{step}: {type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    return row


def fold_error(model: Any, x: Any) -> float:
    """Largest difference of the folded network's outputs over the largest output; in float64 where the network knows it.

    With random statistics activations grow from layer to layer, and in float32 the network itself is not known to more than a few digits.
    """
    import torch

    import qat

    def error(network: Any, images: Any) -> float:
        with torch.no_grad():
            expected = network(images)
            return float((qat.fold(network, (images,))(images) - expected).abs().max() / expected.abs().max())

    try:
        return error(copy.deepcopy(model).double(), x.double())
    except (RuntimeError, ValueError):  # a float32 written into its forward
        return error(model, x)


def randomise_statistics(model: Any) -> None:
    """Statistics and parameters of every BatchNorm that a wrong fold would not survive, negative gammas included."""
    import torch

    for module in model.modules():
        if getattr(module, "running_var", None) is None:
            continue
        with torch.no_grad():
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            if getattr(module, "weight", None) is not None:
                module.weight.uniform_(0.5, 1.5).mul_(torch.where(torch.rand_like(module.weight) < 0.1, -1.0, 1.0))
                module.bias.normal_(0, 0.1)


def line(row: dict[str, Any]) -> str:
    """A row for a log."""
    left = sum(row.get("left", {}).values())
    told = row.get("failed") or f"{row['identical']:.4%} identical, {row['max_lsb']} LSB; as a whole {row['as_a_whole']:.2%}"
    return f"{row['name']:40} folded {row.get('folded', 0):4} left {left:3}  {'FAILED ' if row.get('failed') else ''}{told}"


def as_markdown(rows: list[dict[str, Any]], passed: int) -> str:
    """The table with a summary."""
    lines = [f"{passed} of {len(rows)} networks pass ({passed / len(rows):.1%}).", ""]
    lines += [
        "Identical integers of file and convert(), tensor by tensor from the same ones, and as a whole, where single roundings grow.",
        "",
    ]
    lines += ["| network | size | folded | left, and why | identical | LSB | as a whole | |", "|---|---|---|---|---|---|---|---|"]
    for row in rows:
        left = "; ".join(f"{count} {reason}" for reason, count in row.get("left", {}).items()).replace("|", "/")
        parity = f"{row['identical']:.6f} | {row['max_lsb']} | {row['as_a_whole']:.4f}" if "identical" in row else " | | "
        failed = f"FAILED {row['failed']}".replace("|", "/") if row.get("failed") else "ok"
        lines.append(f"| {row['name']} | {row.get('size', '')} | {row.get('folded', '')} | {left} | {parity} | {failed} |")
    return "\n".join(lines) + "\n"
