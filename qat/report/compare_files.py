"""Write the files of a comparison, each whole or not at all."""

import os
import tempfile
from pathlib import Path

from qat.errors import ConfigError


def check_writable(folder: Path) -> None:
    """Make the folder.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"a folder that cannot be written to ({error.strerror or error})"
        raise ConfigError(f"--out {folder}", found, "one that can", "Give --out FOLDER.") from error


def write_whole(path: Path, content: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(content, encoding="utf-8")
    os.replace(part, path)
