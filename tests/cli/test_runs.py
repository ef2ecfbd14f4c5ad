"""The folder of a run, and how runs end."""

import json

import pytest
from omegaconf import OmegaConf

from qat.cli import run_folder
from qat.cli.train import main
from qat.errors import QATError

BASE = "recipe=mbv1_bncorr"


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_run_folder_holds_configuration_environment_and_log(here, jobs, capsys):
    assert main([BASE, "seed=3", "run_root=elsewhere"]) == 0
    ((config, folder),) = jobs.seen
    assert folder.parent == (here / "elsewhere" / "mbv1_bncorr").relative_to(here)
    assert OmegaConf.to_container(OmegaConf.load(folder / "config.yaml")) == config
    env = json.loads((folder / "env.json").read_text())
    assert env["command"].endswith("recipe=mbv1_bncorr seed=3 run_root=elsewhere")
    assert set(env["packages"]) >= {"torch", "torchvision", "pytorch-lightning", "timm", "onnx", "onnxruntime"}
    assert set(env["git"]) == {"commit", "dirty"} and env["python"] and env["cpu"] and env["device"]
    assert str(folder) in (folder / "train.log").read_text() and str(folder) in capsys.readouterr().out


def test_two_runs_two_folders_and_an_existing_one_is_left_alone(here, jobs, monkeypatch):
    main([BASE])
    main([BASE])
    (_, first), (_, second) = jobs.seen
    assert first != second
    monkeypatch.setattr(run_folder, "stamp", lambda: first.name)
    before = (first / "env.json").read_bytes()
    with pytest.raises(FileExistsError):
        main([BASE, "seed=5"])
    assert (first / "env.json").read_bytes() == before and len(jobs.seen) == 2


def test_log_has_what_the_job_logs_and_warns(here, jobs, capsys):
    import logging
    import warnings

    def act(config):
        logging.getLogger("qat.train.somewhere").info("said")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("careful", stacklevel=1)

    before = list(logging.getLogger().handlers)
    jobs.act = act
    assert main([BASE]) == 0
    log, out = (jobs.seen[0][1] / "train.log").read_text(), capsys.readouterr().out
    assert "said" in log and "careful" in log and "said\n" in out and "warning: " in out
    assert logging.getLogger().handlers == before


def test_known_error_is_one_line(here, jobs, capsys):
    def act(config):
        raise QATError("stem.conv", "a loop", "one graph", "Unroll it.")

    jobs.act = act
    assert main([BASE]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "stem.conv: found a loop; expected one graph. Unroll it." in line
    folder = jobs.seen[0][1]
    failed = result(folder)
    assert (failed["status"], failed["recipe"], failed["fold"], failed["seed"]) == ("failed", "mbv1_bncorr", "bn_correction", 0)
    assert "stem.conv" in failed["error"] and "Traceback" in failed["traceback"] and "Traceback" in (folder / "train.log").read_text()


def test_unexpected_error_shows_its_traceback(here, jobs, capsys):
    jobs.act = lambda config: 1 / 0
    assert main([BASE]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: ZeroDivisionError")
    assert result(jobs.seen[0][1])["status"] == "failed"


def test_sweep_runs_every_combination_in_order(here, jobs):
    assert main(["-m", "recipe=mbv1_bncorr,mbv1_static", "seed=0,1"]) == 0
    assert [(c["recipe"], c["fold"]["name"], c["seed"]) for c, _ in jobs.seen] == [
        ("mbv1_bncorr", "bn_correction", 0),
        ("mbv1_bncorr", "bn_correction", 1),
        ("mbv1_static", "static", 0),
        ("mbv1_static", "static", 1),
    ]
    assert len({folder for _, folder in jobs.seen}) == 4


def test_sweep_over_groups_ranges_and_globs(here, jobs):
    assert main(["recipe=glob(imagenette_*_per_*)", "fold=naive", "seed=range(2)", "-m"]) == 0
    assert [(c["recipe"][-7:], c["fold"]["name"], c["seed"]) for c, _ in jobs.seen] == [
        ("channel", "naive", 0),
        ("channel", "naive", 1),
        ("_tensor", "naive", 0),
        ("_tensor", "naive", 1),
    ]


def test_sweep_goes_on_after_a_failure(here, jobs, capsys):
    def act(config):
        if config["seed"] == 1:
            raise RuntimeError("no memory")

    jobs.act = act
    assert main(["-m", BASE, "seed=0,1,2"]) == 1
    assert [(folder / "result.json").exists() for _, folder in jobs.seen] == [False, True, False]
    *_, header, first, second, third, last = capsys.readouterr().out.splitlines()
    assert header.split() == ["recipe", "fold", "seed", "float", "ptq", "fake-q", "int"]
    assert [line.split() for line in (first, second, third)] == [
        ["mbv1_bncorr", "bn_correction", str(s), w] for s, w in enumerate(["ok", "failed", "ok"])
    ]
    assert last == "2 of 3 jobs ok"


def test_interrupt_stops_the_sweep_and_says_how_to_go_on(here, jobs, capsys):
    def act(config):
        raise KeyboardInterrupt

    jobs.act = act
    assert main(["-m", BASE, "seed=0,1"]) == 130
    ((_, folder),) = jobs.seen
    assert result(folder)["status"] == "interrupted"
    out = capsys.readouterr().out
    assert f"resume={folder}" in out and "0 of 2 jobs ok, 1 not started" in out


@pytest.mark.parametrize("rank, folder, status", [("1", "there", 0), ("1", None, 2)])
def test_other_ranks_use_the_folder_of_rank_0(here, jobs, monkeypatch, rank, folder, status):
    monkeypatch.setenv("LOCAL_RANK", rank)
    if folder:
        monkeypatch.setenv("QAT_RUN_DIR", folder)
    assert main([BASE, "trainer.devices=2"]) == status
    assert [str(where) for _, where in jobs.seen] == ([folder] if folder else [])
    assert not (here / "runs").exists()
