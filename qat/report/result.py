"""result.json: what a run came to."""

import json
import traceback
from pathlib import Path
from typing import Any

from qat.errors import ConfigError
from qat.whole_file import write_whole

NAME = "result.json"


def write_result(run_dir: Path, result: dict[str, Any]) -> Path:
    """Write run_dir/result.json, whole or not at all."""
    return write_whole(Path(run_dir) / NAME, json.dumps(result, indent=2, allow_nan=False) + "\n")


def read_result(run_dir: Path) -> dict[str, Any]:
    """The result of a run folder.

    Raises:
        ConfigError: no result there, or not a readable one.
    """
    path = Path(run_dir) / NAME
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(str(run_dir), f"no {NAME}", "the folder of a finished run", "Give a folder under runs/.") from error
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"a file that cannot be read ({error})", "the result of a run", "Run it again.") from error
    if not isinstance(result, dict) or "status" not in result:
        raise ConfigError(str(path), "no status", "the result of a run", "Run it again.")
    return result


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a result that are known before the run."""
    quant = config["quant"]
    return {
        "recipe": config["recipe"],
        "fold": config["fold"]["name"],
        "seed": config["seed"],
        "weight_bits": quant["weight"]["bits"],
        "activation_bits": quant["activation"]["bits"],
        "per_channel": quant["weight"]["per_channel"],
    }


def failed_result(config: dict[str, Any], error: BaseException) -> dict[str, Any]:
    """The result of a run that ended with `error`."""
    return {
        "status": "failed",
        **identity(config),
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(error)),
    }
