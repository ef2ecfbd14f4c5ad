"""What a run was made with: env.json in its folder."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from qat.cli.folders import PACKAGE

PACKAGES = ("qat", "torch", "torchvision", "pytorch-lightning", "timm", "onnx", "onnxscript", "onnxruntime", "hydra-core", "numpy")


def installed(package: str) -> str | None:
    """Its version; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_state(folder: Path = PACKAGE.parent) -> dict[str, Any]:
    """{"commit", "dirty"} of the clone the package runs from; both None when it was installed, or without git."""
    if not (folder / ".git").exists():
        return {"commit": None, "dirty": None}
    try:
        command = ["git", "-C", str(folder)]
        commit = subprocess.run([*command, "rev-parse", "HEAD"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        changes = subprocess.run([*command, "status", "--porcelain"], capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(changes.strip())}


def processor() -> str:
    """The model name of the CPU where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or platform.machine()
    )


def environment(words: list[str]) -> dict[str, Any]:
    """
    Args:
        words: the command line after the program's name.
    """
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *words]),
        "python": platform.python_version(),
        "packages": {package: installed(package) for package in PACKAGES},
        "device": device,
        "cuda": torch.version.cuda,
        "cpu": processor(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "git": git_state(),
    }
