"""Sweeps through Hydra's launchers. With n_jobs=1 joblib runs the jobs in this process, one after the other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qat.cli.train import main

pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="pip install 'qat[joblib]'")
SWEEP = ["-m", "recipe=mbv1_bncorr,mbv1_static", "seed=0,1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=1"]


def test_each_job_has_its_configuration_folder_and_result(here, jobs, capsys):
    def act(config):
        if (config["fold"]["name"], config["seed"]) == ("static", 0):
            raise RuntimeError("no memory")

    jobs.act = act
    assert main(SWEEP) == 1
    assert [(c["recipe"], c["fold"]["name"], c["seed"]) for c, _ in jobs.seen] == [
        ("mbv1_bncorr", "bn_correction", 0),
        ("mbv1_bncorr", "bn_correction", 1),
        ("mbv1_static", "static", 0),
        ("mbv1_static", "static", 1),
    ]
    assert len({folder for _, folder in jobs.seen}) == 4
    for config, folder in jobs.seen:
        assert folder.parts[:2] == ("runs", config["recipe"])
        assert json.loads((folder / "env.json").read_text())["command"].endswith(" ".join(SWEEP))
    assert [(folder / "result.json").exists() for _, folder in jobs.seen] == [False, False, True, False]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 of 4 jobs ok" and lines[-3].split() == ["mbv1_static", "static", "0", "failed"]
    assert sorted(path.name for path in (here / "runs").iterdir()) == ["launched", "mbv1_bncorr", "mbv1_static"]


@pytest.mark.parametrize(
    ("words", "where", "hint"),
    [
        (["recipe=mbv1_bncorr", "hydra/launcher=joblib"], "hydra.launcher", "-m"),
        (["-m", "recipe=mbv1_bncorr", "hydra.launcher.n_jobs=2"], "hydra.launcher", "hydra/launcher=NAME"),
        (["-m", "recipe=mbv1_bncorr", "hydra/launcher=slurm"], "hydra/launcher", "joblib"),
        ([*SWEEP, "hydra.launcher.jobs=2"], "hydra.launcher", "jobs"),
        ([*SWEEP, "seed=x"], "seed", "a whole number"),
        ([*SWEEP, "trainer.devices=2"], "trainer.devices", "sweep"),
        ([*SWEEP, "hydra.sweep.dir=x"], "hydra.sweep.dir", "run_root"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_job(refused, words, where, hint):
    line = refused(*words)[0]
    assert line.startswith(f"error: {where}:") and hint in line


def test_a_launcher_that_is_not_installed_names_its_extra(refused, monkeypatch):
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

    monkeypatch.setattr(ConfigLoaderImpl, "get_group_options", lambda self, group, *rest, **more: ["basic"])
    (line,) = refused("-m", "recipe=mbv1_bncorr", "hydra/launcher=submitit_slurm")
    assert line.endswith("pip install 'qat[submitit]'.")


@pytest.mark.slow
def test_two_at_a_time(here):
    """The same results as one after the other."""
    words = "model.options.width=0.25 data.image_size=16 float_training.max_epochs=1 trainer.max_epochs=1 trainer.limit_train_batches=4"
    sweep = ["-m", "recipe=mbv1_bncorr,mbv1_static", *words.split(), "fold.freeze=2"]
    found = {}
    for place, more in (("joblib", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]), ("plain", [])):
        command = [sys.executable, str(Path(__file__).parents[2] / "train.py"), *sweep, f"run_root={place}", *more]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "2 of 2 jobs ok" in done.stdout, done.stderr[-3000:]
        results = [json.loads(path.read_text()) for path in sorted((here / place).glob("mbv1_*/*/result.json"))]
        found[place] = [(result["recipe"], result["accuracy"], result["parity"]) for result in results]
    assert len(found["plain"]) == 2 and found["joblib"] == found["plain"]
