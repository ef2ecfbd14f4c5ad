"""The folder of a sweep: <run_root>/<recipe>/<time>/ with sweep.yaml, tuned.json, and the run folders of its jobs below jobs/."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from qat.cli.compose import leaves
from qat.cli.resume import value_at
from qat.cli.run_folder import stamp
from qat.cli.sweep_plan import PLACES, Job, Plan, identity_key
from qat.cli.sweep_section import Section
from qat.errors import ConfigError
from qat.report.result import NAME, read_result
from qat.train.recorded import recorded_config
from qat.whole_file import write_whole

SWEEP = "sweep.yaml"
ENDED = ("ok", "failed")


def what_is_swept(section: Section, run_root: str) -> dict[str, Any]:
    """The content of sweep.yaml."""
    parts = {"over": section.over, "tune": section.tune, "baseline": section.baseline}
    return {"recipe": section.recipe, "words": list(section.words), **parts, "run_root": run_root}


def new_folder(run_root: str, recipe: str) -> Path:
    """
    Raises:
        ConfigError: run_root cannot be written to.
    """
    folder = Path(run_root) / recipe / stamp()
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError("run_root", f"{run_root!r} ({error})", "a folder that can be written to", "Set run_root=FOLDER.") from error
    return folder


def write_sweep(folder: Path, section: Section, run_root: str) -> None:
    write_whole(folder / SWEEP, OmegaConf.to_yaml(what_is_swept(section, run_root)))


def read_sweep(folder: Path) -> dict[str, Any]:
    """sweep.yaml, which may be someone else's: read as data, without interpolations.

    Raises:
        ConfigError: not readable, or not of that shape.
    """
    path, todo = folder / SWEEP, "Start the sweep again."
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(str(path), f"a file that cannot be read ({type(error).__name__})", "what a sweep runs", todo) from error
    kinds = {"recipe": str, "words": list, "over": dict, "tune": dict, "run_root": str}
    if not isinstance(content, dict) or any(not isinstance(content.get(key), kind) for key, kind in kinds.items()):
        raise ConfigError(str(path), "other content", f"the keys {', '.join(kinds)}", todo)
    if not all(isinstance(word, str) for word in content["words"]) or "${" in str(content):
        raise ConfigError(str(path), "an interpolation, or words that are no text", "plain values", "Look at who wrote this file.")
    return {str(key): value for key, value in content.items()}


class Jobs:
    """Which job is in which folder, told by its configuration and not by its name.

    Args:
        folder: of the sweep.

    Raises:
        ConfigError: a job's folder holds another configuration, or one that cannot be used (see `recorded_config`).
    """

    def __init__(self, folder: Path, plan: Plan):
        self.root = folder / "jobs"
        trusted = frozenset(str(job.config["model"]["name"]) for job in plan.jobs.values())
        self._known: dict[str, Path] = {}
        configs: dict[str, dict[str, Any]] = {}
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            if (path / "config.yaml").is_file():
                configs[path.name] = config = recorded_config(path, trusted)
                self._known[identity_key(config)] = path
        for job in plan.jobs.values():
            if job.key not in self._known and job.name in configs:
                old = configs[job.name]
                other = [key for key in leaves({**job.config, "resume": None}) if value_at(old, key) != value_at(job.config, key)]
                found = f"other values of {', '.join(key for key in other if key not in PLACES)}"
                raise ConfigError(str(self.root / job.name), found, "those of the sweep", "Start a sweep of its own with sweep.new=true.")

    def of(self, job: Job) -> Path:
        return self._known.get(job.key, self.root / job.name)

    def started(self, job: Job) -> bool:
        """Whether there is a run to go on with."""
        return (self.of(job) / "config.yaml").is_file()

    def result(self, job: Job) -> dict[str, Any] | None:
        """The result of a job that ended, well or not; None: not begun, or stopped on the way."""
        if not self.started(job) or not (self.of(job) / NAME).is_file():
            return None
        result = read_result(self.of(job))
        return result if result["status"] in ENDED else None


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Inside, no other process can run this sweep; a process that dies lets go of it.

    Raises:
        ConfigError: another one runs it.
    """
    try:
        import fcntl
    except ImportError:  # no such locks on this system
        yield
        return
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            todo = "Wait for it, or start another with sweep.new=true."
            raise ConfigError(str(folder), "a sweep that another process is running", "one process", todo) from error
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
