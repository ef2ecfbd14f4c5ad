import sys
from types import SimpleNamespace

import pytest

from qat.cli.train import main


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def jobs(monkeypatch):
    """Jobs asked to run, as (config, run folder), in place of running them. Set `jobs.act` to what a job should do."""
    recorded = SimpleNamespace(seen=[], act=lambda config: None, check=lambda config: "")

    def run_job(config, run_dir):
        recorded.seen.append((config, run_dir))
        recorded.act(config)
        return {"status": "ok"}

    monkeypatch.setitem(sys.modules, "qat.train.job", SimpleNamespace(run_job=run_job, check_job=lambda config: recorded.check(config)))
    return recorded


@pytest.fixture
def refused(here, jobs, capsys):
    """Run a command line that must be refused before any work; returns the lines on standard error."""

    def run(*words):
        assert main(list(words)) == 2
        assert not jobs.seen and not (here / "runs").exists()
        return capsys.readouterr().err.splitlines()

    return run


@pytest.fixture
def write_recipe(here):
    """Write a recipe of the user's own."""

    def write(name, text):
        path = here / "recipes" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Folder of a small run on the digits, and the folder it was made in."""
    place = tmp_path_factory.mktemp("run_commands")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        words = "recipe=mbv1_bncorr model.options.width=0.25 float_training.max_epochs=2 trainer.max_epochs=1 data.image_size=16"
        assert main(words.split()) == 0
    (folder,) = (place / "runs" / "mbv1_bncorr").iterdir()
    return folder
