"""A training step to time: forward, cross-entropy, backward, SGD; and the memory it takes."""

from __future__ import annotations

import timm
import torch
import torchvision
from torch import Tensor, nn

from qat.choose import check_name
from qat.errors import ConfigError, QATError

CLASSES = 10


def build_network(name: str) -> nn.Module:
    """A torchvision classifier, or a timm one, with random weights.

    Raises:
        ConfigError: unknown to both.
    """
    known = torchvision.models.list_models(module=torchvision.models)
    if name in known:
        return torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
    if not timm.is_model(name):
        check_name("--models", name, known)
    return timm.create_model(name, num_classes=CLASSES)


def picture_batch(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Random pictures (N, 3, size, size) and labels (N)."""
    generator = torch.Generator().manual_seed(0)
    x, labels = torch.randn(batch, 3, size, size, generator=generator), torch.randint(CLASSES, (batch,), generator=generator)
    return x.to(device), labels.to(device)


def check_device(device: str) -> str:
    """
    Raises:
        ConfigError: one that is not there.
    """
    if check_name("--device", device, ("cpu", "cuda")) == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "cuda", "a CUDA device, and none is there", "Use --device cpu.")
    return device


class TrainingStep:
    """A call that trains the network one step and waits until it is done."""

    def __init__(self, network: nn.Module, x: Tensor, labels: Tensor):
        self.network, self.x, self.labels = network, x, labels
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.network(self.x), self.labels).backward()
        self.optimizer.step()
        if self.x.is_cuda:
            torch.cuda.synchronize()


def peak_memory(step: TrainingStep) -> int:
    """Bytes of a step at its peak: parameters, buffers, gradients, optimizer state, and what the step itself allocates."""
    network, optimizer = step.network, step.optimizer
    step()
    held = [*network.parameters(), *network.buffers(), *(p.grad for p in network.parameters() if p.grad is not None)]
    held += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    base = sum(t.numel() * t.element_size() for t in held)
    if next(network.parameters()).is_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return base + torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    if not changes:
        raise QATError("memory of a step", "a profile without memory events", "those of torch.profiler", "Report it with torch's version.")
    now = highest = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return base + highest
