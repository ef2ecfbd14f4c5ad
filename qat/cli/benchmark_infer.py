"""Latency of a network with its BatchNorms, folded, and in integers; in torch and in onnxruntime.

onnxruntime folds BatchNorms itself when it opens a file. To see what folding saves there, the unfolded network is run with that fusion
switched off ("unfolded").
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import timm
import torch
from rich.table import Table
from timm.layers import LayerNorm2d
from torch import Tensor, nn

import qat
from qat.choose import check_name
from qat.cli.command import OK, positive, print_wide
from qat.cli.environment import environment
from qat.deploy.latency import Spread, interleaved, ratio
from qat.deploy.runtime import feed, session
from qat.report.plots import ratio_bars

MODELS: dict[str, Callable[[], nn.Module]] = {
    "mobilenetv1": lambda: timm.create_model("mobilenetv1_100"),
    "mobilenetv2": lambda: timm.create_model("mobilenetv2_100"),
    "resnet18": lambda: timm.create_model("resnet18"),
    "resnet50": lambda: timm.create_model("resnet50"),
    "fasternet_t0": lambda: timm.create_model("fasternet_t0"),
    "efficientformer_l1": lambda: timm.create_model("efficientformer_l1"),
}
# The same network with a norm that cannot be folded [FasterNet, arXiv 2303.03667, table 5].
WITH_LAYER_NORM: dict[str, Callable[[], nn.Module]] = {"fasternet_t0": lambda: timm.create_model("fasternet_t0", norm_layer=LayerNorm2d)}
BN_FUSIONS = ["ConvBNFusion", "MatMul_BatchNormalization_Fusion"]
BASELINE = "folded"


def add_infer(commands: Any) -> argparse.ArgumentParser:
    """The subcommand and its options."""
    parser = commands.add_parser("infer", help="latency of unfolded, folded and integer networks", description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated (%(default)s)")
    parser.add_argument("--batch", default="1,32", help="pictures at a time, comma-separated (%(default)s)")
    parser.add_argument("--size", type=int, default=224, help="height and width of the pictures (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch and of onnxruntime (%(default)s)")
    parser.set_defaults(run=run_infer)
    return parser


def run_infer(arguments: argparse.Namespace) -> int:
    models = [check_name("--models", name, MODELS) for name in arguments.models.split(",")]
    batches = [positive("--batch", text) for text in arguments.batch.split(",")]
    for key in ("size", "rounds", "threads"):
        positive(f"--{key}", getattr(arguments, key))
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in models:
        for batch in batches:
            rows += measure(name, batch, arguments.size, arguments.rounds, arguments.threads)
            print_rows([row for row in rows if row["model"] == name and row["batch"] == batch])
    if arguments.output:
        write(arguments, rows)
    return OK


def measure(name: str, batch: int, size: int, rounds: int, threads: int) -> list[dict[str, Any]]:
    """A row for each variant in each runtime."""
    torch.manual_seed(0)
    x = torch.randn(batch, 3, size, size)
    model = MODELS[name]().eval()
    with_statistics(model, size)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        calls, facts = variants(name, model, x, Path(place), threads)
        with torch.inference_mode():
            seconds = interleaved(calls, rounds)
    for key, measured in seconds.items():
        runtime, variant = key.split(": ")
        own, against = Spread.of(measured), ratio(measured, seconds[f"{runtime}: {BASELINE}"])
        rows.append(
            {
                "model": name,
                "batch": batch,
                "runtime": runtime,
                "variant": variant,
                **{f"ms_{end}": round(1000 * value, 3) for end, value in vars(own).items()},
                **{f"ratio_{end}": round(value, 4) for end, value in vars(against).items()},
                **facts.get(key, {}),
            }
        )
    return rows


def with_statistics(model: nn.Module, size: int) -> None:
    """Statistics of random pictures for every BatchNorm, so that ranges are those of a trained network's order."""
    model.train()
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(8, 3, size, size))
    model.eval()


def variants(name: str, model: nn.Module, x: Tensor, place: Path, threads: int) -> tuple[dict[str, Callable[[], Any]], dict[str, dict]]:
    """Calls by "runtime: variant", and what is to be said about some of them."""
    folded = qat.fold(model, (x,))
    prepared = qat.prepare(model, (x,))
    qat.calibrate(prepared, [torch.randn_like(x[:1].expand(min(8, len(x)), *x.shape[1:])) for _ in range(2)])
    integers = qat.export_onnx(qat.convert(prepared), (x,), place / "int8.onnx")
    calls: dict[str, Callable[[], Any]] = {
        "torch: unfolded": lambda: model(x),
        "torch: folded": lambda: folded(x),
        "onnxruntime: unfolded": opened(write_float(model, x, place / "float.onnx"), x, threads, BN_FUSIONS, place / "unfolded.onnx"),
        "onnxruntime: folded": opened(write_float(folded, x, place / "folded.onnx"), x, threads),
        "onnxruntime: int8": opened(integers, x, threads, keep=place / "optimized.onnx"),
    }
    if name in WITH_LAYER_NORM:
        norm = WITH_LAYER_NORM[name]().eval()
        calls["torch: LayerNorm"] = lambda: norm(x)
        calls["onnxruntime: LayerNorm"] = opened(write_float(norm, x, place / "norm.onnx"), x, threads)
    kinds = [node.op_type for node in onnx.load(place / "optimized.onnx").graph.node]
    floats = sorted({kind for kind in kinds if kind in ("Conv", "FusedConv", "Gemm", "MatMul", "Add", "Mul")})
    said = {"fused": sum(kind.startswith(("QLinear", "QGemm")) for kind in kinds), "float": {kind: kinds.count(kind) for kind in floats}}
    left = sum(node.op_type == "BatchNormalization" for node in onnx.load(place / "unfolded.onnx").graph.node)
    return calls, {"onnxruntime: int8": said, "onnxruntime: unfolded": {"batch_norms": left}}


def write_float(model: nn.Module, x: Tensor, path: Path) -> Path:
    """The float network as it is: the exporter's own rewriting would fold its BatchNorms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), path, dynamo=True, optimize=False, verbose=False)
    return path


def opened(path: Path, x: Tensor, threads: int, disabled: list[str] | None = None, keep: Path | None = None) -> Callable[[], Any]:
    """A call that runs the file on x."""
    run = session(path, keep, threads=threads, disabled=disabled)
    inputs = feed(run, x)
    return lambda: run.run(None, inputs)


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("model", "batch", "runtime", "variant"):
        table.add_column(heading)
    for heading in ("ms", "quartiles", f"times {BASELINE}", "quartiles"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["batch"]),
            row["runtime"],
            row["variant"],
            f"{row['ms_median']:.2f}",
            f"{row['ms_low']:.2f}-{row['ms_high']:.2f}",
            f"{row['ratio_median']:.3f}",
            f"{row['ratio_low']:.3f}-{row['ratio_high']:.3f}",
        )
    print_wide(table, 160)


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """latency.json and latency.svg in the output folder."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(arguments, key) for key in ("models", "batch", "size", "rounds", "threads")}
    words = ["infer", *(f"--{key}={value}" for key, value in settings.items())]
    found = {"command": " ".join(["python scripts/benchmark.py", *words]), "environment": environment(words), "rows": rows}
    (arguments.output / "latency.json").write_text(json.dumps(found, indent=1) + "\n")
    (arguments.output / "latency.svg").write_text(ratio_bars(rows, f"time, {BASELINE} float network = 1"))
