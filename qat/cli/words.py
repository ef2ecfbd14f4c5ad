"""Values as words of a command line, in Hydra's grammar."""

import re
import shlex
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_][\w./-]*", re.IGNORECASE | re.ASCII)


def word(key: str, value: Any) -> str:
    """`key=value`, which Hydra reads as that value."""
    return f"{key}={text(value)}"


def resume_words(folder: Path) -> str:
    """`resume=FOLDER` as a shell takes it."""
    return f"resume={folder}" if re.fullmatch(r"[\w./-]+", str(folder), re.ASCII) else shlex.quote(word("resume", str(folder)))


def text(value: Any) -> str:
    """A value by itself; the keys of a mapping stand as they are."""
    if isinstance(value, list):
        return f"[{','.join(map(text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{text(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        # backslashes count only in front of a quote
        return "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value) + "'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
