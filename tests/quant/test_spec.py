import pytest
from quant_reference import grid

from qat.errors import QATError
from qat.quant import QuantSpec


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("narrow", [True, False])
def test_grid(bits, symmetric, narrow):
    spec = QuantSpec(bits, symmetric, narrow=narrow)
    assert (spec.qmin, spec.qmax) == grid(bits, symmetric, narrow)
    assert spec.signed == symmetric


def test_narrow_has_no_meaning_on_an_asymmetric_grid():
    assert QuantSpec(symmetric=False, narrow=True) == QuantSpec(symmetric=False, narrow=False)


@pytest.mark.parametrize("bits", [0, 1, 9, 4.0, True, "8", None])
def test_bits_out_of_range(bits):
    with pytest.raises(QATError, match=r"QuantSpec\.bits.*from 2 to 8"):
        QuantSpec(bits=bits)
