"""Where the integers are to run, and what that machine does to them."""

from __future__ import annotations

from collections.abc import Iterable

from qat.deploy.modules import IntegerLayer

TARGETS = {
    "ort_x86": "onnxruntime on x86; without VNNI the session option x64quantprecision=1 is needed for full 8-bit weights",
    "ort_vnni": "onnxruntime on x86 with VNNI",
}


def saturation_risk(layers: Iterable[IntegerLayer]) -> list[str]:
    """Layers with a weight code beyond 7 bits.

    x86 without VNNI adds pairs of u8 x s8 products in saturating int16: 2 * 255 * 64 still fits, 2 * 255 * 127 does not.
    """
    return [layer.name for layer in layers if int(layer.codes.int().abs().max()) > 64]
