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
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{name:<{width}}  {what:<6}  {why}" for name, what, why in rows]
        return "\n".join([title, *lines, *(f"note: {note}" for note in self.notes)])
