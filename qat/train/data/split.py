"""Stratified splits and the checks that labels have to pass."""

import torch
from torch import Tensor

from qat.errors import ConfigError


def stratified(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices (kept, held out), ascending; `fraction` of every class is held out, at least one sample of each side.

    Args:
        labels: (N,) integers.
        fraction: in (0, 1).
        seed: chooses the samples.

    Raises:
        ConfigError: fraction out of (0, 1), or a class of one sample.
    """
    if not 0 < fraction < 1:
        raise ConfigError("data.val_fraction", str(fraction), "a number between 0 and 1", "Set the share of train to hold out, e.g. 0.15.")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        if len(members) < 2:
            raise ConfigError(
                "data", f"1 training picture of class {label}", "2 or more, to hold one out", "Add pictures or drop the class."
            )
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def class_count(where: str, train: Tensor, **others: Tensor) -> int:
    """Number of classes of the training labels (N,); the labels of the other splits must be among them.

    Raises:
        ConfigError: negative labels, a gap in 0 .. K-1, or a class that training never shows.
    """
    seen = set(train.unique().tolist())
    classes = max(seen) + 1
    missing = sorted(set(range(classes)) - seen)
    if min(seen) < 0 or missing:
        found = f"labels from {min(seen)} to {max(seen)}" + (f" without {missing[:5]}" if missing else "")
        raise ConfigError(f"{where} (train)", found, "every label from 0 to the number of classes - 1", "Renumber the labels.")
    for split, labels in others.items():
        unseen = sorted(set(labels.unique().tolist()) - seen)
        if unseen:
            todo = "Make both splits of the same classes."
            raise ConfigError(f"{where} ({split})", f"labels {unseen[:5]}", f"the training labels 0 to {classes - 1}", todo)
    return classes
