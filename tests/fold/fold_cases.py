"""Layers with their reference, and the comparison of the two."""

import torch
from fold_kinds import KINDS
from fold_reference import Quant, Reference
from torch import Tensor, nn

from qat.fold import STRATEGIES, FoldedConvBN
from qat.quant import FakeQuantizer, QuantSpec

QUANTS = {"float": Quant(), "w4_per_tensor": Quant(4, False), "w8_per_channel": Quant(8, True)}
GAMMAS = ("plain", "negative", "one_zero")
NORMS = ((1e-5, 0.1), (1e-3, 0.03), (1e-5, None))
BATCH_STRATEGIES = [name for name in STRATEGIES if name not in ("static", "frozen")]
FLOAT_EQUAL = ["naive", "bn_correction", "single_pass", "scale_merge"]


def quantizer(quant: Quant, range: str = "minmax") -> FakeQuantizer | None:
    return None if quant.bits is None else FakeQuantizer(QuantSpec(quant.bits, per_channel=quant.per_channel), range)


def pair(kind: str, bias: bool = False, gamma: str = "plain", eps: float = 1e-5, momentum: float | None = 0.1, seed: int = 0):
    """A float64 layer and BatchNorm with statistics, gamma and beta of no special value."""
    torch.manual_seed(seed)
    conv = KINDS[kind].build(bias).double()
    channels = conv.out_features if isinstance(conv, nn.Linear) else conv.out_channels
    bn = KINDS[kind].norm(channels, eps=eps, momentum=momentum).double()
    with torch.no_grad():
        bn.weight.uniform_(0.5, 1.5)
        if gamma == "negative":
            bn.weight[::2] *= -1
        if gamma == "one_zero":
            bn.weight[1] = 0
        bn.bias.normal_()
        bn.running_mean.normal_()
        bn.running_var.uniform_(0.3, 2.0)
    return conv, bn


def layer_and_reference(strategy: str, kind: str, quant: Quant, **options) -> tuple[FoldedConvBN, Reference]:
    conv, bn = pair(kind, **options)
    layer = STRATEGIES[strategy](conv, bn, quantizer(quant))
    copies = [None if p is None else p.detach().clone().requires_grad_() for p in (conv.weight, conv.bias, bn.weight, bn.bias)]
    running = (bn.running_mean.clone(), bn.running_var.clone())
    return layer, Reference(KINDS[kind], *copies, *running, bn.eps, bn.momentum, quant)


def batch(kind: str, seed: int) -> Tensor:
    """Inputs with a mean and a size, so that the statistics of a layer are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(KINDS[kind].shape, generator=generator, dtype=torch.float64) * 1.5 + 0.4).requires_grad_()


def gradients(y: Tensor, leaves: list[Tensor | None]) -> list[Tensor]:
    """Of a loss that weighs every output differently, so that no gradient vanishes by symmetry."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape).sin() + 0.3
    return list(torch.autograd.grad((y * weights + 0.1 * y * y * weights).sum(), [leaf for leaf in leaves if leaf is not None]))


def assert_close(got: Tensor, expected: Tensor, what: str, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")
