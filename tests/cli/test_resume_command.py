"""`resume=RUN_DIR` on the command line."""

import pytest

from qat.cli.train import main
from qat.report.result import write_result


@pytest.fixture
def stopped(here, jobs):
    """Folder of an interrupted run with seed 3."""

    def act(config):
        raise KeyboardInterrupt

    jobs.act = act
    assert main(["recipe=mbv1_bncorr", "fold=static", "seed=3"]) == 130
    jobs.act = lambda config: None
    ((_, folder),) = jobs.seen
    jobs.seen.clear()
    return folder


@pytest.mark.parametrize("words", [[], ["recipe=mbv1_bncorr"], ["recipe=mbv1_bncorr", "fold=static", "seed=3"], ["seed=3"]])
def test_goes_on_in_the_same_folder_with_the_same_configuration(stopped, jobs, words):
    recorded, log = (stopped / "config.yaml").read_bytes(), (stopped / "train.log").read_text()
    assert main([*words, f"resume={stopped}"]) == 0
    ((config, folder),) = jobs.seen
    assert folder == stopped and config["resume"] == str(stopped)
    assert (config["seed"], config["fold"]["name"]) == (3, "static")
    assert (stopped / "config.yaml").read_bytes() == recorded
    assert (stopped / "train.log").read_text().startswith(log)
    assert len(list(stopped.glob("env*.json"))) == 2


@pytest.mark.parametrize(
    "words, named",
    [
        (["seed=4"], "seed"),
        (["seed=0"], "seed"),
        (["recipe=mbv1_static"], "recipe"),
        (["fold=naive"], "fold.name"),
        (["trainer.max_epochs=99"], "trainer.max_epochs"),
    ],
)
def test_other_settings_are_refused(stopped, jobs, capsys, words, named):
    capsys.readouterr()
    assert main([*words, f"resume={stopped}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and "Drop them" in line and not jobs.seen


def test_finished_run_is_not_resumed(stopped, jobs, capsys):
    write_result(stopped, {"status": "ok"})
    assert main([f"resume={stopped}"]) == 2
    assert "finished" in capsys.readouterr().err and not jobs.seen


def test_resume_that_fails_at_once_leaves_a_result(stopped, jobs):
    def act(config):
        raise ValueError("no")

    jobs.act = act
    assert main([f"resume={stopped}"]) == 1
    assert '"failed"' in (stopped / "result.json").read_text()
