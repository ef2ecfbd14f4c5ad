"""Layers chosen by patterns of their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from qat.errors import QATError
from qat.fold import FoldedConvBN


def chosen(step: str, layers: Mapping[str, FoldedConvBN], patterns: Sequence[str] | None) -> dict[str, FoldedConvBN]:
    """Those of `layers` whose name some pattern (fnmatch) matches; all when there are no patterns.

    Raises:
        QATError: one string instead of a sequence; a pattern that matches no layer.
    """
    if patterns is None:
        return dict(layers)
    if isinstance(patterns, str):
        raise QATError(f"{step}.layers", repr(patterns), "a sequence of patterns", f"Write layers=[{patterns!r}].")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            close = difflib.get_close_matches(pattern, layers, n=3)
            hint = f"Did you mean {', '.join(close)}?" if close else f"The layers are {', '.join(list(layers)[:8])}."
            raise QATError(f"{step}.layers", repr(pattern), "a pattern that matches a quantized layer", hint)
    return {name: layer for name, layer in layers.items() if any(fnmatchcase(name, pattern) for pattern in patterns)}
