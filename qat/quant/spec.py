"""The integer grid a tensor is rounded to: how many bits, where zero lies, one scale or one a channel."""

from dataclasses import dataclass

from qat.errors import QATError


@dataclass(frozen=True)
class QuantSpec:
    """A grid of integers [qmin, qmax].

    symmetric: signed, zero point 0, [-2^(b-1), 2^(b-1)-1]; narrow leaves out the lowest integer, so that a sign flip is lossless.
    asymmetric: unsigned, [0, 2^b-1] with a zero point in range; narrow has no meaning there and reads False.
    per_channel: one scale for every index of the quantizer's axis, otherwise one for the tensor.
    power_of_two: scales are powers of two, so that a machine without multipliers requantizes by shifts.

    Raises:
        QATError: bits is not a whole number from 2 to 8.
    """

    bits: int = 8
    symmetric: bool = True
    per_channel: bool = True
    narrow: bool = True
    power_of_two: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise QATError("QuantSpec.bits", repr(self.bits), "a whole number from 2 to 8", "Write for example QuantSpec(bits=4).")
        for key in ("symmetric", "per_channel", "narrow", "power_of_two"):
            if not isinstance(getattr(self, key), bool):
                raise QATError(f"QuantSpec.{key}", repr(getattr(self, key)), "true or false", f"Write QuantSpec({key}=True).")
        if not self.symmetric:
            object.__setattr__(self, "narrow", False)

    @property
    def signed(self) -> bool:
        return self.symmetric

    @property
    def qmin(self) -> int:
        return -(2 ** (self.bits - 1)) + self.narrow if self.symmetric else 0

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.symmetric else 2**self.bits - 1
