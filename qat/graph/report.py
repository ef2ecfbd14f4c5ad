"""What was folded, what was left and why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FoldReport:
    """The outcome of looking for foldable normalisations.

    Attributes:
        folded: pairs (conv name, BN name).
        left: pairs (norm name, reason); these stay in the model and obey train/eval.
        notes: anything else a user should know (layers left in float, branches chosen at capture).
    """

    folded: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [(bn, "folded", f"into {conv}") for conv, bn in self.folded] + [(norm, "left", why) for norm, why in self.left]
        title = f"{len(self.folded)} folded, {len(self.left)} left"
        if not rows:
            return "\n".join([f"{title} (no normalisation found)", *self.notes])
        return "\n".join([title, *_lines(rows), *(f"note: {note}" for note in self.notes)])


@dataclass
class StepReport:
    """What one post-training step did to a network.

    Attributes:
        step: its name.
        done: pairs (layer or layers, what was done to them).
        left: pairs (layer or layers, reason).
        notes: anything else a user should know (measured deviations).
    """

    step: str
    done: list[tuple[str, str]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [*((name, "done", what) for name, what in self.done), *((name, "left", why) for name, why in self.left)]
        title = f"{self.step}: {len(self.done)} done, {len(self.left)} left"
        return "\n".join([title, *_lines(rows), *(f"note: {note}" for note in self.notes)])


def _lines(rows: list[tuple[str, str, str]]) -> list[str]:
    width = max((len(name) for name, _, _ in rows), default=0)
    return [f"{name:<{width}}  {what:<6}  {why}" for name, what, why in rows]
