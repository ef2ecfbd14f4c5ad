"""onnxruntime, set up so that its sums are exact also on x86 machines without VNNI."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor


def session(model: str | Path | bytes, optimized_path: str | Path | None = None) -> onnxruntime.InferenceSession:
    """A CPU session; without VNNI with `x64quantprecision`, as 8-bit products would else be added in saturating int16."""
    options = onnxruntime.SessionOptions()
    if not sums_exactly():
        options.add_session_config_entry("session.x64quantprecision", "1")
    options.log_severity_level = 3
    if optimized_path is not None:
        options.optimized_model_filepath = str(optimized_path)
    return onnxruntime.InferenceSession(model if isinstance(model, bytes) else str(model), options, providers=["CPUExecutionProvider"])


def sums_exactly() -> bool:
    """Whether this machine adds u8 x s8 products without saturation: x86 with VNNI, or no x86."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return True
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and "vnni" in cpuinfo.read_text()


def feed(runtime: onnxruntime.InferenceSession, batch: Tensor | tuple) -> dict[str, np.ndarray]:
    """Inputs of a session by name, from a tensor or a tuple of positional inputs."""
    tensors = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {i.name: x.detach().cpu().numpy() for i, x in zip(runtime.get_inputs(), tensors, strict=True)}


def predict(path: str | Path, batches: Iterable[Any]) -> Iterator[Tensor]:
    """First output of the file for each batch."""
    runtime = session(path)
    for batch in batches:
        yield torch.from_numpy(runtime.run(None, feed(runtime, batch))[0])
