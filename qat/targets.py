"""Where the integers are to run, and what that machine asks of them. (No torch here: the configuration is read without it.)"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """What a runtime computes, as far as it decides how a network has to be quantized.

    Args:
        what: one line for people.
        weight_bits: most bits of a weight.
        symmetric_activations: whether activations have to be signed with zero point 0.
        keeps_sums: whether the sums of a convolution are added to a residual branch before they are rounded, so that no quantizer
            stands in between.
        rounds_as_onnx: whether a float half-way between two codes goes where ONNX says. Pictures have few levels, evenly spaced, that all
            lie half-way where the mean is half of the range; the input's range is then widened by half a step.
        int4: whether weights stored as ONNX INT4 give what they say.
        reason: why, for refusals.
    """

    what: str
    reason: str = ""
    weight_bits: int = 8
    symmetric_activations: bool = False
    keeps_sums: bool = False
    rounds_as_onnx: bool = True
    int4: bool = True

    def problem(self, weight_bits: int, symmetric: bool, rounds_sums: bool = False, half_way: bool = False) -> tuple[str, str] | None:
        """What a network has that this target does not compute, and what it does and why.

        Args:
            weight_bits: most bits of its weights.
            symmetric: whether all its activations are.
            rounds_sums: whether the sums of a convolution are rounded before they are added to a residual branch.
            half_way: whether the levels of pictures may lie half-way between two codes of its input.
        """
        if weight_bits > self.weight_bits:
            return f"weights of {weight_bits} bits", f"at most {self.weight_bits}" + (f": {self.reason}" if self.reason else "")
        if self.symmetric_activations and not symmetric:
            return "asymmetric activations", f"symmetric ones: {self.reason}"
        if self.keeps_sums and rounds_sums:
            return "sums of a convolution rounded before a residual addition", f"sums added as they are, as {self.what} does in any case"
        if half_way and not self.rounds_as_onnx:
            return "an input range whose pixels may lie half-way between two codes", f"one {self.what} rounds as training did"
        return None


TARGETS = {
    "ort_x86": Target(
        "onnxruntime on any x86",
        "without VNNI pairs of 8-bit products are added in saturating int16",
        weight_bits=7,
    ),
    "ort_vnni": Target("onnxruntime on x86 with VNNI, or on ARM"),
    "openvino": Target("OpenVINO", keeps_sums=True, rounds_as_onnx=False, int4=False),
    "tensorrt": Target(
        "TensorRT",
        "it computes int8 with zero point 0 only",
        symmetric_activations=True,
        keeps_sums=True,
        rounds_as_onnx=False,
    ),
    "integer_only": Target("machines without floating point: 31-bit fixed-point multipliers, or shifts where scales are powers of two"),
}


def suit_target(quant: dict[str, Any], target: str) -> dict[str, Any]:
    """The `quant` part of a recipe with the grids its target needs: fewer bits of weights, signed activations; an unknown target changes
    nothing."""
    needs = TARGETS.get(target, Target(""))
    weight, activation = quant["weight"], quant["activation"]
    if weight["bits"] == 8:  # the most there is; other numbers are wrong or fewer, and left to the checks
        weight = {**weight, "bits": needs.weight_bits}
    if needs.symmetric_activations:
        activation = {**activation, "symmetric": True, "narrow": False}
    return {**quant, "weight": weight, "activation": activation}
