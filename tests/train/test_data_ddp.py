"""Two processes under Lightning: disjoint shards, and a resume in the middle of an epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from pytorch_lightning import Trainer
from test_data_resume import DATA, Recorder, SaveEverywhere
from qat.train.data import build_data

def fit(folder, checkpoint=None, workers=0):
    data = build_data(DATA | {"batch_size": 100, "eval_batch_size": 75, "workers": workers}, 1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", num_sanity_val_steps=0,
                      callbacks=[SaveEverywhere(Path(folder))], **quiet)
    module = Recorder()
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    loader = trainer.train_dataloader
    loader.sampler.set_epoch(0)
    return module.seen, [index for _, index in loader.sampler]

folder = sys.argv[1]
whole, order = fit(folder + "/a")
resumed, _ = fit(folder + "/b", folder + "/a/step=7.ckpt", workers=1)
orders = [None, None]
dist.all_gather_object(orders, order)
result = {"steps": len(whole), "same": resumed == whole[7:], "orders": orders}
Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
"""


@pytest.mark.slow
def test_two_processes(tmp_path):
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for result in results:
        assert result["steps"] == 10 and result["same"]
        first, second = map(set, result["orders"])
        assert not first & second and len(first) == len(second) == 573
