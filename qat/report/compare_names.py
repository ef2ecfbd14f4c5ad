"""Names of what a comparison compares, and of what it compares it in."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

STRATEGY = "fold.name"
BITS, ACTIVATION_BITS, PER_CHANNEL = "quant.weight.bits", "quant.activation.bits", "quant.weight.per_channel"
GRID = (BITS, ACTIVATION_BITS, PER_CHANNEL)
_FIRST = (*GRID, "model.name", "data.name")
_BARE = (STRATEGY, "model.name")  # values that need no key in front


def text(value: Any) -> str:
    """A value as YAML would show it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def values(config: dict[str, Any], keys: Iterable[str]) -> tuple[Any, ...]:
    return tuple(config.get(key) for key in keys)


def grid_label(config: dict[str, Any]) -> str:
    """W4A8 per tensor."""
    return f"W{config.get(BITS)}A{config.get(ACTIVATION_BITS)} per {'channel' if config.get(PER_CHANNEL) else 'tensor'}"


def variant_names(configs: list[dict[str, Any]], keys: list[str], by: list[str]) -> dict[tuple[Any, ...], str]:
    """By the values of `keys`: those of `by`, the first of them, and of the others as far as they tell apart those with the same."""
    found = list(dict.fromkeys(values(config, keys) for config in configs))
    names = {}
    for own in found:
        rivals = [other for other in found if other[: len(by)] == own[: len(by)]]
        parts = [text(value) if key in _BARE else f"{key} {text(value)}" for key, value in zip(by, own)]
        for i in range(len(by), len(keys)):
            if len({other[i] for other in rivals}) > 1:
                parts.append(f"{keys[i].removeprefix('fold.')} {text(own[i])}")
        names[own] = ", ".join(parts)
    return names


def setting_names(
    configs: list[dict[str, Any]], keys: list[str], compared: Iterable[str]
) -> tuple[dict[tuple[Any, ...], str], dict[str, Any]]:
    """By the values of `keys`: the grids, unless they are among what is compared, and as few other keys as tell the settings apart, each
    where it is not the commonest; and those commonest values."""
    example = {values(config, keys): config for config in configs}.values()
    grid = () if set(GRID) & set(compared) else GRID
    shown: list[str] = []
    for key in sorted(keys, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        if len({values(c, [*grid, *shown, key]) for c in example}) > len({values(c, [*grid, *shown]) for c in example}):
            shown.append(key)
    plain = [key for key in shown if key in ("model.name", "data.name")]
    others = [key for key in shown if key not in grid and key not in plain]
    usual = {key: Counter(config.get(key) for config in example).most_common(1)[0][0] for key in others}
    names = {}
    for config in example:
        told = [f"{key} {text(config.get(key))}" for key in others if config.get(key) != usual[key]]
        head = [grid_label(config)] if grid else []
        names[values(config, keys)] = ", ".join([*head, *(text(config.get(key)) for key in plain), *told]) or "all grids"
    return names, usual
