"""A run of two processes leaves the folder a run of one leaves, and both processes end with the same network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat.report.layers import read_layers
from qat.report.result import read_result
from qat.train.metrics_file import read_metrics

# Lightning starts the second process with the same script and words.
SCRIPT = """
import os, sys
import torch
from qat.cli.train import main
from qat.train import job

def fit(trainer, module, data, checkpoint=None, original=job.fit):
    original(trainer, module, data, checkpoint)
    torch.save({"state": module.state_dict(), "step": trainer.global_step}, f"rank{trainer.global_rank}.pt")

job.fit = fit
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""
WORDS = (
    "recipe=mbv1_bncorr model=python model.name=tiny_networks:tiny data=npz data.batch_size=8 float_training.max_epochs=1 "
    "trainer.max_epochs=2 trainer.limit_train_batches=4 trainer.devices=2 trainer.accelerator=cpu trainer.strategy=ddp fold.freeze=3"
)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["fold=naive", "quant=w4a4_lsq"]], ids=["recipe", "learned scales"])
def test_two_processes(tmp_path, pictures, words):
    here = Path(__file__).parent
    (tmp_path / "two.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "two.py", *WORDS.split(), f"data.root={pictures}", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    (run,) = (tmp_path / "runs" / "mbv1_bncorr").iterdir()
    names = {path.name for path in run.iterdir() if not path.name.startswith("events.")}
    whole = {
        "checkpoints",
        "config.yaml",
        "env.json",
        "layers.json",
        "metrics.csv",
        "model.onnx",
        "report.html",
        "result.json",
        "train.log",
    }
    assert whole <= names <= whole | {"hparams.yaml"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "float.ckpt"}
    result = read_result(run)
    assert (result["status"], result["steps"], result["freeze_step"]) == ("ok", 8, 3) and result["parity"]["max_lsb"] <= 1
    assert json.loads((run / "env.json").read_text())["command"].startswith("two.py recipe=mbv1_bncorr")
    assert len([row for row in read_metrics(run / "metrics.csv") if "val_acc" in row]) == 2
    layers = read_layers(run)
    assert layers["jitter"]["steps"] == layers["ranges"]["steps"] == list(range(1, 8)) and set(layers) >= {"filters", "sqnr"}
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["step"] == second["step"] == 8 and first["state"].keys() == second["state"].keys()
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name
    saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, first["state"][name]) for name, value in saved.items())
