"""Where configs/ and recipes/ are: inside the package when it was installed from a wheel, beside it in a clone."""

from pathlib import Path

import qat

PACKAGE = Path(qat.__file__).resolve().parent


def packaged(name: str, package: Path = PACKAGE) -> Path:
    """The folder `name` that came with the package.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no {name}/ in {package} or beside it: install qat again")
