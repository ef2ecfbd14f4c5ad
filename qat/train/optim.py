"""Optimizers, their parameter groups, and the learning rate as a function of the optimizer step."""

from collections.abc import Callable
from typing import Any

from timm.scheduler import CosineLRScheduler, StepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from qat.errors import ConfigError
from qat.quant import FakeQuantizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
SCHEDULES = ("cosine", "constant")


def split_parameters(network: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Trainable parameters in three parts, each parameter once.

    "weights": two or more dimensions, decayed. "plain": biases, BN's gamma and beta, PReLU slopes, not decayed: pulling gamma
    to zero would shrink the folded weight twice. "quantizers": learned scales and zero points, not decayed.
    """
    learned = {id(p) for module in network.modules() if isinstance(module, FakeQuantizer) for p in module.parameters(recurse=False)}
    parts: dict[str, list[nn.Parameter]] = {"weights": [], "plain": [], "quantizers": []}
    for parameter in network.parameters():
        if parameter.requires_grad:
            part = "quantizers" if id(parameter) in learned else "weights" if parameter.ndim > 1 else "plain"
            parts[part].append(parameter)
    return parts


def build_optimizer(network: nn.Module, optim: dict[str, Any]) -> Optimizer:
    """The optimizer of a recipe's `optim` part; `scale_lr`, when given, is the learning rate of the quantizers' parameters.

    Every group has an `lr_scale` that timm's schedules multiply in and that is saved with the optimizer's state.

    Raises:
        ConfigError: unknown optimizer.
    """
    name = optim["name"]
    if name not in OPTIMIZERS:
        raise ConfigError("optim.name", repr(name), "one of " + ", ".join(OPTIMIZERS), "Choose one of these.")
    parts = split_parameters(network)
    decay = optim.get("weight_decay", 0.0)
    scale_lr = optim.get("scale_lr")
    groups: list[dict[str, Any]] = [
        {"params": parts["weights"], "weight_decay": decay, "lr_scale": 1.0},
        {"params": parts["plain"], "weight_decay": 0.0, "lr_scale": 1.0},
        {"params": parts["quantizers"], "weight_decay": 0.0, "lr_scale": 1.0, "lr": optim["lr"] if scale_lr is None else scale_lr},
    ]
    options = {"momentum": optim.get("momentum", 0.0)} if name == "sgd" else {}
    return OPTIMIZERS[name]([group for group in groups if group["params"]], lr=optim["lr"], **options)


def build_schedule(optimizer: Optimizer, optim: dict[str, Any], steps: int) -> Scheduler:
    """timm schedule over `steps` optimizer steps, to be moved with `step_update(steps done)`.

    Warm-up is linear over `warmup_steps` and starts at one share of the lowest group's rate, not at a step that does nothing.

    Raises:
        ConfigError: unknown schedule.
    """
    name, warmup = optim.get("schedule", "cosine"), optim.get("warmup_steps", 0)
    start = min(group["lr"] for group in optimizer.param_groups) / (warmup + 1)
    shared: dict[str, Any] = {"warmup_t": warmup, "warmup_lr_init": start, "t_in_epochs": False}
    if name == "cosine":
        # a cycle of one step would only print a notice that it has no effect
        return CosineLRScheduler(optimizer, t_initial=max(steps, 2), lr_min=optim.get("min_lr", 0.0), **shared)
    if name == "constant":
        return StepLRScheduler(optimizer, decay_t=max(steps, 1), decay_rate=1.0, **shared)
    raise ConfigError("optim.schedule", repr(name), "one of " + ", ".join(SCHEDULES), "Choose one of these.")


def scale_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Multiply the rate of every group from the next step on, for the rest of the schedule."""
    for group in optimizer.param_groups:
        group["lr_scale"] = group.get("lr_scale", 1.0) * factor
        group["lr"] *= factor
