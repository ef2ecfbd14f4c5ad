"""Post-training methods: steps that each take a network and return a changed copy, without any training."""

from qat.ptq.absorb import absorb_bias
from qat.ptq.adaround import adaround
from qat.ptq.correct_bias import correct_bias
from qat.ptq.equalize import equalize
from qat.ptq.reestimate import reestimate_bn

__all__ = ["absorb_bias", "adaround", "correct_bias", "equalize", "reestimate_bn"]
