"""Run jobs whose configurations are checked: a folder each, and a result in it however the job ends."""

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from qat.cli.command import FAILED, INTERRUPTED, OK
from qat.cli.environment import environment
from qat.cli.logs import FILE_ONLY, logged
from qat.cli.run_folder import new_run_folder, stamp, write_env
from qat.cli.words import resume_words
from qat.errors import ConfigError, QATError
from qat.report.result import failed_result, identity, write_result

log = logging.getLogger("qat.cli")

_FOLDER = "QAT_RUN_DIR"  # tells the processes that Lightning starts for other devices where the run is


def run_jobs(configs: list[dict[str, Any]], words: list[str], notes: list[str]) -> int:
    """Run one after the other; a failed one does not keep the others from running, Ctrl-C does.

    Args:
        words: the command line, for env.json.
        notes: said at the start of each log.

    Returns:
        Exit status: 0, 1 if a job failed, 130 if the user stopped it.
    """
    outcomes = []
    for number, config in enumerate(configs, 1):
        if len(configs) > 1:
            print(f"\njob {number} of {len(configs)}: {config['recipe']}, fold {config['fold']['name']}, seed {config['seed']}", flush=True)
        outcomes.append(run_one(config, words, notes))
        if outcomes[-1][0] == INTERRUPTED:
            break
    return sweep_status(configs, outcomes)


def sweep_status(configs: list[dict[str, Any]], outcomes: list[tuple[int, dict[str, Any]]]) -> int:
    """Print a table of several jobs, from the (exit status, result) of those that ran; the exit status of them all."""
    statuses = [status for status, _ in outcomes]
    results = [{**identity(config), **result} for config, (_, result) in zip(configs, outcomes)]
    if len(configs) > 1:
        print("\n" + "\n".join(sweep_lines(results)))
        not_started = len(configs) - len(statuses)
        print(f"{statuses.count(OK)} of {len(configs)} jobs ok" + (f", {not_started} not started" if not_started else ""))
    return INTERRUPTED if statuses[-1] == INTERRUPTED else max(statuses)


def sweep_lines(results: list[dict[str, Any]]) -> list[str]:
    """A table of the jobs of a sweep, a line each: what ran and its accuracies (shares of the test split), or how it ended."""
    width = max(len(str(result["recipe"])) for result in results)
    lines = [f"{'recipe':<{width}}  {'fold':<14}  {'seed':>4}  {'float':>6}  {'ptq':>6}  {'fake-q':>6}  {'int':>6}"]
    for result in results:
        accuracy = result.get("accuracy") or {}
        numbers = "  ".join(f"{accuracy[key]:6.4f}" for key in ("float", "ptq", "fake_quant", "integer") if key in accuracy)
        lines.append(f"{result['recipe']!s:<{width}}  {result['fold']:<14}  {result['seed']:>4}  {numbers or result['status']}")
    return lines


def run_one(
    config: dict[str, Any], words: list[str], notes: list[str], folder: Path | None = None, brief: bool = False
) -> tuple[int, dict[str, Any]]:
    """One job: exit status and result. On other ranks than 0 the folder and what is said are rank 0's affair.

    Args:
        folder: for a new run; None: one of its own.
        brief: leave tracebacks to train.log and result.json.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return _other_rank(config), {}
    if config["resume"]:
        folder = Path(config["resume"])
        write_env(folder / f"env_resumed_{stamp()}.json", environment(words))
    else:
        folder = new_run_folder(config, environment(words), folder)
    os.environ[_FOLDER] = str(folder)
    try:
        with logged(folder):
            for note in [*notes, f"{'resumed' if config['resume'] else 'run'} in {folder}"]:
                log.info("%s", note)
            return _finish(config, folder, brief)
    finally:
        del os.environ[_FOLDER]


def _finish(config: dict[str, Any], folder: Path, brief: bool) -> tuple[int, dict[str, Any]]:
    try:
        from qat.train.job import run_job

        result = run_job(config, folder)
        log.info("result in %s", folder / "result.json")
        return OK if result.get("status", "ok") == "ok" else FAILED, result
    except KeyboardInterrupt:
        result = {"status": "interrupted", **identity(config)}
        write_result(folder, result)
        log.info("interrupted; go on with %s", resume_words(folder))
        return INTERRUPTED, result
    except Exception as error:
        result = failed_result(config, error)
        write_result(folder, result)
        log.error("failed", exc_info=True, **FILE_ONLY)  # type: ignore[arg-type]
        if not isinstance(error, QATError) and not brief:
            traceback.print_exc()
        message = str(error) if isinstance(error, QATError) else f"{type(error).__name__}: {error}"
        print(f"error: {message} ({folder / 'train.log'})", file=sys.stderr)
        return FAILED, result


def _other_rank(config: dict[str, Any]) -> int:
    from qat.train.job import run_job

    if _FOLDER not in os.environ:
        todo = "Start one process with trainer.devices=N; it starts the others."
        raise ConfigError("LOCAL_RANK", os.environ["LOCAL_RANK"], "a process started by Lightning", todo)
    run_job(config, Path(os.environ[_FOLDER]))
    return OK
