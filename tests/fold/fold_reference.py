"""The strategies written once more, straight from their equations, in float64 and without a module: what the tests compare with.

Nothing is shared with qat.fold. Where the equations allow two forms this is the other one: transposed weights are scaled in place by the
channel of each entry, single_pass divides the output instead of the weights, running averages are (1 - m) old + m new.
"""

from dataclasses import dataclass, field

import torch
from fold_kinds import Kind
from torch import Tensor


@dataclass
class Quant:
    """Symmetric narrow min-max grid of so many bits; bits=None is the identity."""

    bits: int | None = None
    per_channel: bool = False


@dataclass
class Reference:
    kind: Kind
    weight: Tensor
    bias: Tensor | None
    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor
    eps: float
    momentum: float | None
    quant: Quant
    steps: int = field(default=0)

    @property
    def channels(self) -> int:
        return self.gamma.numel()

    @property
    def own_bias(self) -> Tensor:
        return torch.zeros_like(self.beta) if self.bias is None else self.bias

    @property
    def sigma(self) -> Tensor:
        return (self.var + self.eps) ** 0.5

    def channel_of_entry(self) -> Tensor:
        """Output channel of every weight entry, in the shape of the weight."""
        w, g = self.weight, self.kind.transposed_groups
        if g == 0:
            first = torch.arange(w.shape[0]).view(-1, *[1] * (w.dim() - 1))
        else:
            group = torch.arange(w.shape[0]) // (w.shape[0] // g)
            first = (group[:, None] * w.shape[1] + torch.arange(w.shape[1])[None, :]).view(*w.shape[:2], *[1] * (w.dim() - 2))
        return first.expand(w.shape)

    def q(self, w: Tensor) -> Tensor:
        """Fake quantization with the straight-through gradient; at min-max nothing is clipped."""
        if self.quant.bits is None:
            return w
        top = 2 ** (self.quant.bits - 1) - 1
        size = w.detach().abs()
        if self.quant.per_channel:
            of = self.channel_of_entry()
            scale = torch.stack([size[of == k].max() for k in range(self.channels)])[of] / top
        else:
            scale = size.max().expand(w.shape) / top
        scale = torch.where(scale == 0, 1.0, scale)
        return w + (scale * torch.round(w.detach() / scale) - w.detach())

    def rows(self, v: Tensor) -> Tensor:
        return v[self.channel_of_entry()]

    def conv(self, x: Tensor, w: Tensor) -> Tensor:
        return self.kind.apply(x, w)

    def view(self, v: Tensor, y: Tensor) -> Tensor:
        return v.view(1, -1, *[1] * (y.dim() - 2))

    def moments(self, y: Tensor) -> tuple[Tensor, Tensor, int]:
        flat = y.transpose(0, 1).reshape(y.shape[1], -1)
        mean = flat.sum(1) / flat.shape[1]
        return mean, ((flat - mean[:, None]) ** 2).sum(1) / flat.shape[1], flat.shape[1]

    def update(self, mean: Tensor, var: Tensor, n: int) -> None:
        self.steps += 1
        m = 1 / self.steps if self.momentum is None else self.momentum
        self.mean = (1 - m) * self.mean + m * (mean + self.own_bias).detach()
        self.var = (1 - m) * self.var + m * (var * n / (n - 1)).detach()

    def affine(self, u: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return u * self.view(scale, u) + self.view(shift, u)

    # The strategies. mu_B is the mean without the layer's bias throughout; self.mean has it.

    def inference(self, x: Tensor) -> Tensor:
        u = self.conv(x, self.q(self.weight * self.rows(self.gamma / self.sigma)))
        return self.affine(u, torch.ones_like(self.beta), self.beta + (self.own_bias - self.mean) * self.gamma / self.sigma)

    def naive(self, x: Tensor) -> Tensor:
        mu, var, n = self.moments(self.conv(x, self.weight))
        sigma = (var + self.eps) ** 0.5
        u = self.conv(x, self.q(self.weight * self.rows(self.gamma / sigma)))
        self.update(mu, var, n)
        return self.affine(u, torch.ones_like(mu), self.beta - self.gamma * mu / sigma)

    def moving_average(self, x: Tensor) -> Tensor:
        y = self.inference(x)
        self.update(*self.moments(self.conv(x.detach(), self.weight.detach())))
        return y

    def frozen(self, x: Tensor) -> Tensor:
        return self.inference(x)

    def batch_renorm(self, x: Tensor, r_max: float = 3.0, d_max: float = 5.0) -> Tensor:
        mu, var, n = self.moments(self.conv(x, self.weight))
        sigma = (var + self.eps) ** 0.5
        r = (sigma / self.sigma).detach().clamp(1 / r_max, r_max)
        d = ((mu + self.own_bias - self.mean) / self.sigma).detach().clamp(-d_max, d_max)
        u = self.conv(x, self.q(self.weight * self.rows(self.gamma * r / sigma)))
        self.update(mu, var, n)
        return self.affine(u, torch.ones_like(mu), self.beta - self.gamma * mu * r / sigma + self.gamma * d)

    def bn_correction(self, x: Tensor) -> Tensor:
        mu, var, n = self.moments(self.conv(x, self.weight))
        sigma = (var + self.eps) ** 0.5
        u = self.conv(x, self.q(self.weight * self.rows(self.gamma / self.sigma)))
        y = self.affine(u, self.sigma / sigma, self.beta - self.gamma * mu / sigma)
        self.update(mu, var, n)
        return y

    def single_pass(self, x: Tensor) -> Tensor:
        s = self.gamma / self.sigma
        live = s != 0
        quantized = self.conv(x, self.q(self.weight * self.rows(s)))
        u = torch.where(self.view(live, quantized), quantized / self.view(torch.where(live, s, 1.0), quantized), self.conv(x, self.weight))
        return self.batch_norm(u)

    def scale_merge(self, x: Tensor) -> Tensor:
        return self.batch_norm(self.conv(x, self.q(self.weight)))

    def batch_norm(self, u: Tensor) -> Tensor:
        mu, var, n = self.moments(u)
        y = self.affine((u - self.view(mu, u)) / self.view((var + self.eps) ** 0.5, u), self.gamma, self.beta)
        self.update(mu, var, n)
        return y

    def scale_merge_inference(self, x: Tensor) -> Tensor:
        s = self.gamma / self.sigma
        return self.affine(self.conv(x, self.q(self.weight)), s, self.beta + (self.own_bias - self.mean) * s)
