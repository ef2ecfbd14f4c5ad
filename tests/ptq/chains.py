"""Small float networks whose layers read each other's channels, with statistics that a step could get wrong."""

import torch
from torch import nn


def conv_bn(inputs: int, outputs: int, kernel: int = 1, groups: int = 1, **options: object) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, groups=groups, bias=False, **options), nn.BatchNorm2d(outputs)]


def separable(act: type[nn.Module] = nn.ReLU, padding: int = 1) -> nn.Sequential:
    """Pointwise, depthwise, pointwise, depthwise, classifier, each with a BatchNorm and an activation."""
    torch.manual_seed(0)
    network = nn.Sequential(
        *conv_bn(3, 8), act(),
        *conv_bn(8, 8, 3, 8, padding=padding), act(),
        *conv_bn(8, 6), act(),
        *conv_bn(6, 6, 3, 6, padding=padding), act(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip
    return uneven(network)


def uneven(network: nn.Module, seed: int = 1) -> nn.Module:
    """Filters of very different ranges, gammas of both signs, in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            size = module.running_mean.shape
            module.running_mean.copy_(torch.randn(size, generator=generator) * 0.3)
            module.running_var.copy_(torch.rand(size, generator=generator) + 0.2)
            if module.affine:
                signs = torch.randn(size, generator=generator).sign()
                module.weight.data.copy_(torch.exp(2 * torch.randn(size, generator=generator)) * signs)
                module.bias.data.copy_(torch.randn(size, generator=generator))
    return network.eval()


def pictures(channels: int = 3, batch: int = 4, size: int = 6) -> torch.Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(7))
