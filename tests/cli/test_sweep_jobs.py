"""A sweep with its real jobs, tiny: one float network for all of them, an interrupted job goes on from its checkpoint."""

import json

import pytest
import torch

from qat.cli.train import main
from qat.train.finished_run import open_run
from qat.train.qat_training import RunCheckpoint

MINI = """defaults: [base/mbv1]
float_training: {seed: 0, max_epochs: 1}
data: {split_seed: 0, image_size: 16}
report: {moments: 0, pictures: 0}
model: {options: {width: 0.25}}
trainer: {max_epochs: 2, limit_train_batches: 4}
sweep: {over: {fold: [static], seed: [0, 1]}, baseline: static}
"""


@pytest.fixture
def stopped_once(monkeypatch):
    """Ctrl-C after the first epoch of the second seed's training."""
    original, calls = RunCheckpoint.on_train_epoch_end, []

    def on_train_epoch_end(self, trainer, pl_module):
        original(self, trainer, pl_module)
        calls.append(self.folder.parent.name)
        if calls.count("static-seed1") == 1 and calls[-1] == "static-seed1":
            raise KeyboardInterrupt

    monkeypatch.setattr(RunCheckpoint, "on_train_epoch_end", on_train_epoch_end)
    return calls


def test_seeds_share_a_float_network_and_an_interrupted_job_goes_on(here, write_recipe, stopped_once, capsys):
    write_recipe("mini", MINI)
    assert main(["recipe=mini"]) == 130
    assert main(["recipe=mini"]) == 0
    out = capsys.readouterr().out
    assert "1 of 2 jobs ok, 1 not done" in out and "2 of 2 jobs ok" in out and "epoch" not in out
    # the float network's epoch, two of the first job, one of the second and, resumed, only the other
    assert stopped_once == ["static-seed0", *["static-seed0"] * 2, *["static-seed1"] * 2]
    (sweep,) = (here / "runs" / "mini").iterdir()
    assert (sweep / "compare.html").is_file()
    folders = [sweep / "jobs" / "static-seed0", sweep / "jobs" / "static-seed1"]
    assert len(list((here / "runs" / "float_cache").iterdir())) == 1
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[0]["accuracy"]["float"] == results[1]["accuracy"]["float"] and all(0 <= r["validation"] <= 1 for r in results)
    runs = [open_run(folder) for folder in folders]
    splits = [run.data().splits for run in runs]
    assert torch.equal(splits[0].val.images, splits[1].val.images)
    assert all(run.float_network()[1] == "the float network it started from" for run in runs)
    epochs = [line for line in (folders[1] / "train.log").read_text().splitlines() if " 1/2 " in line or " 2/2 " in line]
    assert len(epochs) >= 2
