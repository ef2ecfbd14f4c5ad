"""Write a run's file again, for another target or place: `python scripts/export.py RUN_DIR --target ort_vnni`."""

import argparse
from pathlib import Path

import torch

import qat
from qat.cli.command import add_trust, guarded
from qat.errors import ConfigError
from qat.targets import TARGETS
from qat.train.finished_run import open_run
from qat.train.notes import notes_of


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 or 2 (bad input, or a target the network was not trained for).

    Args:
        argv: the command line after the program's name.
    """
    arguments = argument_parser().parse_args(argv)
    return guarded(lambda: export_run(arguments))


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN_DIR", help="folder of a finished run")
    parser.add_argument("--target", choices=TARGETS, help="; ".join(f"{name}: {target.what}" for name, target in TARGETS.items()))
    parser.add_argument("--int4", action="store_true", help="store weights of 4 bits or fewer as ONNX INT4")
    parser.add_argument("--output", type=Path, help="file to write (RUN_DIR/model_TARGET.onnx)")
    add_trust(parser)
    return parser


def export_run(arguments: argparse.Namespace) -> int:
    run = open_run(arguments.run, arguments.trust_model)
    target = arguments.target or run.config["target"]["name"]
    output = arguments.output or run.folder / f"model_{target}.onnx"
    if output.exists():
        raise ConfigError("--output", f"{output}, which is there already", "a new file", "Remove it, or give another name.")
    if not output.parent.is_dir():
        raise ConfigError("--output", f"{output}", "a file in a folder that exists", f"Make {output.parent} first.")
    data = run.data()
    example = torch.zeros(1, *data.input_shape)
    qat.export_onnx(
        qat.convert(run.network(data)), (example,), output, target=target, notes=notes_of(run.config, data), int4=arguments.int4
    )
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB for {target}; check it with scripts/verify.py {run.folder} --file {output}")
    return 0
