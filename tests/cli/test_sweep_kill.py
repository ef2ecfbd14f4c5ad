"""kill -9 at any moment of a sweep: the same command goes on, no job is lost and none is run twice.

One process imports everything and forks for each sweep; its jobs are recorded in a file, not trained.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, json, traceback
from pathlib import Path
from types import SimpleNamespace
import qat.cli.compare, qat.cli.train, qat.fold, qat.train.optim, qat.train.models, qat.train.data
from qat.report.result import identity, write_result

WORDS = ["recipe=mini"]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def count(folders, out, baseline):
    results = [json.loads(path.read_text()) for path in folders[0].glob("jobs/*/result.json")]
    Path("compared").write_text(str(sum(not result.get("tuning") for result in results)))

def forked(folder, patch=None):
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        run_job = job
        if callable(patch):
            run_job = patch() or job
        sys.modules["qat.train.job"] = SimpleNamespace(run_job=run_job, check_job=lambda config: "")
        qat.cli.compare.compare = count
        try:
            os._exit(qat.cli.train.main(list(WORDS)))
        except BaseException:
            traceback.print_exc()
            os._exit(9)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def job(config, run_dir):
    with open("ran", "a") as file:
        file.write(Path(run_dir).name + (" resumed" if config["resume"] else "") + chr(10))
    result = {"status": "ok", **identity(config), "validation": 1 - abs(config["optim"]["lr"] - 0.2), "seconds": {"qat": 1.0}}
    write_result(run_dir, result)
    return result

def in_job(number):
    def patch():
        count = []
        def run_job(config, run_dir):
            count.append(0)
            if len(count) == number:
                Path("ran").open("a").write(Path(run_dir).name + " killed" + chr(10))
                die()
            return job(config, run_dir)
        return run_job
    return patch

def at_rename(name, number, after):
    def patch():
        original, seen = os.replace, []
        def replace(source, target):
            seen.append(Path(target).name)
            last = Path(target).name == name and seen.count(name) == number
            if last and not after:
                die()
            original(source, target)
            if last:
                die()
        os.replace = replace
    return patch

place = Path(sys.argv[1])
moments = {"whole": None, "job 2": in_job(2), "job 6": in_job(6)}
renames = {"sweep.yaml 1": (0, 1), "config.yaml 1": (0,), "config.yaml 6": (1,), "tuned.json 1": (0,)}
renames |= {"result.json 2": (0, 1), "result.json 6": (0, 1)}  # the mark of a job before the choice, the result of the fourth job
for rename, sides in renames.items():
    name, number = rename.split()
    moments |= {f"{('before', 'after')[after]} {rename}": at_rename(name, int(number), after) for after in sides}
asked = sys.argv[3].split(",") if sys.argv[3] else moments
said = {}
for moment in asked:
    patch = moments[moment]
    folder = place / moment
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "mini.yaml").write_text(sys.argv[2])
    said[moment] = [forked(folder, patch), forked(folder)]
(place / "said.json").write_text(json.dumps(said))
"""
MINI = """defaults: [base/mbv1]
float_training: {seed: 0}
sweep:
  over: {fold: [naive, static], seed: [0, 1]}
  tune: {optim.lr: [0.1, 0.2]}
"""
FEW = ["whole", "after config.yaml 6", "before tuned.json 1", "before result.json 6"]
JOBS = [*(f"{fold}-seed0-optim.lr={lr}" for fold in ("naive", "static") for lr in (0.1, 0.2))]
JOBS += [f"{fold}-seed1-optim.lr=0.2" for fold in ("naive", "static")]


@pytest.fixture(scope="module", params=[",".join(FEW), pytest.param("", marks=pytest.mark.slow)], ids=["some moments", "all"])
def place(tmp_path_factory, request):
    place = tmp_path_factory.mktemp("killed_sweeps")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(place), MINI, request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return place


def test_the_killed_sweep_ends_as_the_whole_one(place):
    said = json.loads((place / "said.json").read_text())
    assert said.pop("whole") == [0, 0] and len(said) in (len(FEW) - 1, 11)
    for moment, statuses in said.items():
        assert statuses == [-9, 0], moment
        here = place / moment
        sweeps = [folder for folder in (here / "runs" / "mini").iterdir() if (folder / "sweep.yaml").is_file()]
        assert len(sweeps) == 1, moment
        (folder,) = sweeps
        results = {path.parent.name: json.loads(path.read_text()) for path in (folder / "jobs").glob("*/result.json")}
        assert sorted(results) == sorted(JOBS) and all(result["status"] == "ok" for result in results.values()), moment
        marked = sorted(name for name, result in results.items() if result.get("tuning"))
        assert marked == ["naive-seed0-optim.lr=0.1", "static-seed0-optim.lr=0.1"], moment
        assert json.loads((folder / "tuned.json").read_text())["static"]["values"] == {"optim.lr": 0.2}
        assert (here / "compared").read_text() == "4"
        ran = (here / "ran").read_text().splitlines()
        ended = [line.split()[0] for line in ran if not line.endswith("killed")]
        again = {name for name in ended if ended.count(name) > 1}
        # twice ran only the job whose result was not yet written when the process died
        assert again == ({JOBS[3]} if moment == "before result.json 6" else set()), (moment, ran)
        for line in ran:
            if line.endswith("killed"):
                assert line.replace("killed", "resumed") in ran, moment
