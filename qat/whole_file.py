"""Files that are there whole or not at all, whenever the process ends."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> Path:
    """Write a text file (UTF-8) beside its place and put it there; its path."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return path
