"""Where the files of a comparison go."""

import tempfile
from pathlib import Path

from qat.errors import ConfigError


def check_writable(folder: Path) -> None:
    """Make the folder.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--out {folder}", "a file", "a folder, new or not", "Give --out FOLDER.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        found = f"a folder that cannot be written to ({error.strerror or error})"
        raise ConfigError(f"--out {folder}", found, "one that can", "Give --out FOLDER.") from error
