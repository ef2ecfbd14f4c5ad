"""A sweep through one of Hydra's launchers, `-m hydra/launcher=joblib hydra.launcher.n_jobs=4`: several jobs at a time, or elsewhere.

The launcher only carries the jobs: their configurations are composed and checked here before it starts, and each fills a run folder
as a job without a launcher does.
"""

from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from qat.cli.command import FAILED
from qat.cli.compose import Composer
from qat.cli.run import run_one, sweep_status
from qat.cli.run_folder import stamp
from qat.errors import ConfigError

_GROUP, _KEYS = "hydra/launcher=", "hydra.launcher."
EXTRAS = {"joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}


def split(words: list[str], multirun: bool) -> tuple[list[str], list[str]]:
    """(words of the jobs, words of the launcher).

    Raises:
        ConfigError: words of a launcher without -m or without hydra/launcher=NAME.
    """
    own = [word for word in words if word.startswith((_GROUP, _KEYS))]
    if own and not (multirun and any(word.startswith(_GROUP) for word in own)):
        raise ConfigError("hydra.launcher", " ".join(own), "-m and hydra/launcher=NAME", "See docs/sweeps.md.")
    return [word for word in words if word not in own], own


def prepared_launcher(composer: Composer, own: list[str], run_root: str) -> Launcher:
    """The launcher that `own` describes, before any job is known to it. What it writes goes to run_root/launched/<time>/.

    Raises:
        ConfigError: a launcher that is not installed, or settings it does not have.
    """
    name = next(word for word in own if word.startswith(_GROUP)).removeprefix(_GROUP)
    if name not in composer.loader.get_group_options("hydra/launcher"):
        extra = EXTRAS.get(name)
        todo = f"pip install 'qat[{extra}]'." if extra else f"Known are {', '.join(EXTRAS)}."
        raise ConfigError("hydra/launcher", repr(name), "a launcher that is installed", todo)
    folder = Path(run_root) / "launched" / stamp()
    quiet = [f"hydra.sweep.dir={folder}", "hydra.sweep.subdir=.", "hydra.output_subdir=null"]
    quiet += ["hydra/hydra_logging=none", "hydra/job_logging=none"]
    try:
        config: DictConfig = compose("train", overrides=[*own, *quiet], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("hydra.launcher", " ".join(str(error).split()), f"settings of {name}", "Correct them.") from error
    with open_dict(config):
        config.hydra.runtime.output_dir = str(folder)
        config.hydra.job.num, config.hydra.job.id = 0, "0"
    HydraConfig.instance().set_config(config)
    from hydra._internal.callbacks import Callbacks  # asked for by HydraContext; here, so that no other command needs it

    context = HydraContext(config_loader=composer.loader, callbacks=Callbacks())
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=_refuse, config=config)


def _refuse(config: DictConfig) -> None:
    raise RuntimeError("no jobs given")


def job_of(_: DictConfig, configs: list[dict[str, Any]], words: list[str], notes: list[str]) -> tuple[int, dict[str, Any]]:
    """The job whose number the launcher tells: exit status and result."""
    return run_one(configs[HydraConfig.get().job.num], words, notes)


def launch_jobs(launcher: Any, configs: list[dict[str, Any]], words: list[str], notes: list[str]) -> int:
    """Run all jobs; exit status as that of `run_jobs`."""
    launcher.task_function = partial(job_of, configs=configs, words=words, notes=notes)
    returned = launcher.launch([[] for _ in configs], initial_job_idx=0)
    outcomes = []
    for job in returned:
        try:
            outcomes.append(job.return_value)
        except Exception as error:  # a job that could not even fill its folder
            outcomes.append((FAILED, {"status": f"failed ({type(error).__name__}: {error})"}))
    return sweep_status(configs, outcomes)
