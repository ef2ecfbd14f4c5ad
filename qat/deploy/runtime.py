"""Runtimes that a file is checked on: onnxruntime, with its optimisations or without, and OpenVINO."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from qat.choose import check_name
from qat.errors import QATError

RUNTIMES = {
    "onnxruntime": "onnxruntime with all its optimisations",
    "onnxruntime_unoptimized": "onnxruntime, the graph as it is written",
    "openvino": "OpenVINO on the CPU; needs `pip install 'qat[openvino]'`",
}

# (batch) -> outputs in the file's order
Run = Callable[[Any], list[np.ndarray]]


def open_file(model: str | Path | bytes, runtime: str = "onnxruntime") -> Run:
    """A file ready to run on the CPU.

    Args:
        model: path, or the content of the file.

    Returns:
        function of a batch (tensor, or tuple of positional inputs) that gives the outputs.

    Raises:
        ConfigError: unknown runtime.
        QATError: a runtime that is not installed, a file it cannot read; the function: inputs that the file does not take.
    """
    check_name("runtime", runtime, RUNTIMES)
    told = "the file" if isinstance(model, bytes) else str(model)
    with _said(told, f"a file that {runtime} runs", "Export it again."):
        run = _openvino(model) if runtime == "openvino" else _onnxruntime(model, runtime == "onnxruntime")

    def checked(batch: Any) -> list[np.ndarray]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (batch if isinstance(batch, (tuple, list)) else (batch,)))
        with _said(told, f"inputs that it takes, not {shapes}", "Use the data it was trained for."):
            return run(batch)

    return checked


@contextmanager
def _said(where: str, expected: str, todo: str) -> Iterator[None]:
    """A runtime's own error as one line."""
    try:
        yield
    except QATError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()
        raise QATError(where, f"{type(error).__name__} ({first[0][:200] if first else ''})", expected, todo) from error


def _onnxruntime(model: str | Path | bytes, optimize: bool) -> Run:
    opened = session(model, optimize=optimize)
    return lambda batch: opened.run(None, feed(opened, batch))


def read_file(path: str | Path) -> onnx.ModelProto:
    """An ONNX file.

    Raises:
        QATError: no file, or none that can be read.
    """
    path, expected = Path(path), "an ONNX file"
    if not path.is_file():
        raise QATError(str(path), "no such file", expected, "Correct the path.")
    try:
        return onnx.load(path)
    except Exception as error:
        raise QATError(str(path), f"no ONNX file ({type(error).__name__})", expected, "Correct the path.") from error


def session(
    model: str | Path | bytes,
    optimized_path: str | Path | None = None,
    optimize: bool = True,
    threads: int = 0,
    disabled: list[str] | None = None,
) -> onnxruntime.InferenceSession:
    """A CPU session; without VNNI with `x64quantprecision`, as 8-bit products would else be added in saturating int16.

    Args:
        optimized_path: where to write the graph as onnxruntime runs it.
        threads: of one operator; 0 for as many as there are cores.
        disabled: names of optimisations to leave out.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if not sums_exactly():
        options.add_session_config_entry("session.x64quantprecision", "1")
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    return onnxruntime.InferenceSession(
        model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )


def sums_exactly() -> bool:
    """Whether this machine adds u8 x s8 products without saturation: x86 with VNNI, or no x86."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "vnni" in cpuinfo.read_text()


def feed(runtime: onnxruntime.InferenceSession, batch: Tensor | tuple) -> dict[str, np.ndarray]:
    """Inputs of a session by name, from a tensor or a tuple of positional inputs."""
    return {i.name: x for i, x in zip(runtime.get_inputs(), _arrays(batch), strict=True)}


def predict(path: str | Path, batches: Iterable[Any], runtime: str = "onnxruntime") -> Iterator[Tensor]:
    """First output of the file for each batch."""
    run = open_file(path, runtime)
    for batch in batches:
        yield torch.from_numpy(run(batch)[0])


def _openvino(model: str | Path | bytes) -> Run:
    try:
        import openvino
    except ImportError:
        raise QATError("runtime", "no OpenVINO", "the extra [openvino]", "Run pip install 'qat[openvino]'.") from None
    core = openvino.Core()
    read = core.read_model(model=model if isinstance(model, bytes) else str(model))
    # Left to itself it computes what is float in bfloat16 on machines that have it.
    compiled = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(batch: Any) -> list[np.ndarray]:
        results = compiled(dict(enumerate(_arrays(batch))))
        return [np.asarray(results[i]) for i in range(len(compiled.outputs))]

    return run


def _arrays(batch: Tensor | tuple) -> list[np.ndarray]:
    tensors = batch if isinstance(batch, (tuple, list)) else (batch,)
    return [x.detach().cpu().numpy() for x in tensors]
