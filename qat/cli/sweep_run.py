"""Running a sweep: its jobs one after the other, each in a folder of its own, those that ended before left alone."""

import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path

from qat.cli.command import FAILED, INTERRUPTED, OK
from qat.cli.run import run_one
from qat.cli.sweep_folder import Jobs
from qat.cli.sweep_plan import Job, Plan
from qat.cli.sweep_progress import job_line, job_seconds, seconds_left, status_line, table_lines
from qat.cli.words import resume_words
from qat.report.result import NAME, write_result
from qat.whole_file import write_whole

TUNED = "tuned.json"


class SweepRun:
    """A sweep in its folder, as far as it has come.

    Args:
        run_root: where the jobs keep the float network.
        words: the command line, for env.json.
        notes: said at the start of each log.
    """

    def __init__(self, plan: Plan, folder: Path, run_root: str, words: list[str], notes: list[str]):
        self.plan, self.folder, self.run_root, self.words, self.notes = plan, folder, run_root, words, notes
        self.jobs = Jobs(folder, plan)
        self.retry, self.verbose = ("retry" in plan.section.options, "verbose" in plan.section.options)
        results = {job.name: self.jobs.result(job) for job in plan.jobs.values()}
        self.results = {name: result for name, result in results.items() if result is not None}  # of jobs that ended, well or not
        self.again = {name for name, result in self.results.items() if result["status"] == "failed"} if self.retry else set()
        self.chosen: dict[str, str] = {}
        self._resume = resume_words(folder)

    def run(self) -> int:
        """Run what is left; the exit status of the whole."""
        interrupted = False
        try:
            self._choose()
            for job in self.plan.first():
                self._run(job)
                self._choose()
            for job in self.plan.rest(self.chosen):
                self._run(job)
        except KeyboardInterrupt:
            interrupted = True
        self._end(interrupted)
        return INTERRUPTED if interrupted else FAILED if self._count("failed") or self._left() else OK

    def _all(self) -> list[Job]:
        """Every job, those of cells without a choice yet as with the first values."""
        return [*self.plan.first(), *self.plan.rest({cell: next(iter(self.plan.grid)) for cell in self.plan.cells} | self.chosen)]

    def _left(self) -> list[Job]:
        hopeless = {cell for cell in self.plan.cells if cell not in self.chosen and all(map(self._ended, self.plan.tried(cell)))}
        return [job for job in self._all() if not self._ended(job) and job.cell not in hopeless]

    def _ended(self, job: Job) -> bool:
        return job.name in self.results and job.name not in self.again

    def _count(self, status: str) -> int:
        return sum(self.results.get(job.name, {}).get("status") == status for job in self._all())

    def _run(self, job: Job) -> None:
        if self._ended(job):
            return
        everything, left = self._all(), self._left()
        ok = [known for known in self.plan.jobs.values() if self.results.get(known.name, {}).get("status") == "ok"]
        measured = list(zip((known.kind for known in ok), job_seconds([self.results[known.name] for known in ok])))
        about = seconds_left([other.kind for other in left], measured)
        print(job_line(len(everything) - len(left) + 1, len(everything), self._count("failed"), job.label, about), flush=True)
        folder = self.jobs.of(job)
        if job.name in self.again:
            del self.results[job.name]
            (folder / NAME).unlink()  # killed on the way it is one that was stopped, not one that failed
        config = {**job.config, "run_root": self.run_root, "resume": str(folder) if self.jobs.started(job) else None}
        brief = len(everything) > 1 and not self.verbose
        with _quiet() if brief else nullcontext():
            status, result = run_one(config, self.words, self.notes, folder, brief)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        self.again.discard(job.name)
        self.results[job.name] = result

    def _choose(self) -> None:
        """For every cell whose tuning jobs have all ended: the values of the best validation accuracy, of equal ones the first."""
        before, scores = dict(self.chosen), {}
        for cell in self.plan.cells:
            tried = self.plan.tried(cell)
            if not all(map(self._ended, tried)):
                continue
            if list(self.plan.grid) == [""]:
                self.chosen[cell] = ""
                continue
            scores[cell] = {job.tuned: self.results[job.name].get("validation") for job in tried}
            found = {tuned: score for tuned, score in scores[cell].items() if score is not None}
            if found:
                self.chosen[cell] = max(found, key=lambda tuned: found[tuned])
            if self.chosen.get(cell) != before.get(cell):
                told = ", ".join(f"{tuned} {'failed' if score is None else f'{score:.4f}'}" for tuned, score in scores[cell].items())
                print(f"{cell or 'all'}: chosen {self.chosen[cell]} by validation accuracy ({told})", flush=True)
        if not self.plan.section.tune:
            return
        for job in self.plan.jobs.values():
            # before the choice none of them counts; where all failed, that is what there is to say of the cell
            self._mark(job, job.tuned != self.chosen[job.cell] if job.cell in self.chosen else job.cell not in scores)
        if not scores:
            return
        content = {cell: {"values": self.plan.grid.get(self.chosen.get(cell, "")), "validation": found} for cell, found in scores.items()}
        write_whole(self.folder / TUNED, json.dumps(content, indent=1) + "\n")

    def _mark(self, job: Job, passed_over: bool) -> None:
        """Say in the result of a job whether it only served the choice of values, so that comparison leaves it out."""
        result = self.results.get(job.name)
        if result is None or bool(result.get("tuning")) == passed_over:
            return
        result = {key: value for key, value in result.items() if key != "tuning"} | ({"tuning": True} if passed_over else {})
        self.results[job.name] = result
        if (self.jobs.of(job) / NAME).is_file():
            write_result(self.jobs.of(job), result)

    def _end(self, interrupted: bool) -> None:
        """Table, status line, and the comparison of what there is to compare."""
        everything = self._all()
        ended = [job for job in everything if job.name in self.results]
        if ended:
            print("\n" + "\n".join(table_lines([(job.label, self.results[job.name]) for job in ended])))
        ok, failed = self._count("ok"), self._count("failed")
        print(status_line(ok, failed, len(everything), len(self.plan.impossible)))
        if interrupted:
            print(f"stopped; go on with the same command or with {self._resume}")
        elif failed:
            print(f"failed jobs are left as they are; {self._resume} sweep.retry=true runs them again")
        counted = [result for result in (self.results[job.name] for job in ended) if not result.get("tuning")]
        done = sum(result["status"] == "ok" for result in counted)
        if done > (1 if interrupted else 0):  # nobody waits for a page about one run after Ctrl-C
            self._compare()

    def _compare(self) -> None:
        from qat.cli.compare import compare

        try:
            compare([self.folder], self.folder, None)
        except Exception as error:  # the runs are there, whatever becomes of the page about them
            told = f"{type(error).__name__}: {error}"
            print(
                f"warning: no comparison ({told}); make it with python scripts/compare.py {shlex.quote(str(self.folder))}", file=sys.stderr
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, what a job says is in its train.log alone; but for errors, and the answer to Ctrl-C."""
    answer, log = logging.StreamHandler(sys.stderr), logging.getLogger("qat.train.callbacks.stop_signal")
    log.addHandler(answer)
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            yield
    finally:
        log.removeHandler(answer)
