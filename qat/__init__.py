"""qat: quantization-aware training through folded BatchNorms, down to integers that compute what was trained."""

from importlib import import_module
from typing import Any

_HOMES = {
    "qat.quant": ("FakeQuantizer", "QuantSpec"),
    "qat.fold": ("STRATEGIES", "FoldedConvBN"),
    "qat.graph": (
        "FoldReport",
        "QATConfig",
        "calibrate",
        "freeze_bn",
        "freeze_ranges",
        "load_float",
        "prepare",
        "reestimate_bn",
        "refold",
        "search_weight_ranges",
        "set_fake_quant",
    ),
    "qat.deploy": ("ParityReport", "convert", "export_onnx", "verify"),
    "qat.errors": ("CaptureError", "ConfigError", "QATError"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [*_HOME_OF, "fold", "ptq"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    # Looked up on first use: the table of recipes must not wait for torch.
    if name in ("fold", "ptq"):
        return import_module(f"qat.{name}")  # qat.fold is a callable package: see qat/fold/callable.py
    if name not in _HOME_OF:
        raise AttributeError(f"module 'qat' has no attribute '{name}'")
    return getattr(import_module(_HOME_OF[name]), name)
