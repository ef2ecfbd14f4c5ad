"""kill -9 at any moment: the resumed run is the uninterrupted one, bit by bit, and no half-written file is taken for a whole one.

One process imports everything and forks for each run, with one thread, so that a kill costs a fork and no imports.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = """
import copy, json, os, signal, sys, traceback
from pathlib import Path
import torch
torch.set_num_threads(1)
from pytorch_lightning import Trainer, seed_everything
from conftest import CONFIG
from test_resume import train
from qat.report.result import write_result
from qat.train import float_model
from qat.train.callbacks import run_checkpoint
from qat.train.data import build_data
from qat.train.module import Classifier

place, pictures = Path(sys.argv[1]), sys.argv[2]
CONFIG["data"]["root"], CONFIG["run_root"] = pictures, str(place / "runs")
CONFIG["model"]["options"] = {"dropout": 0.3}
CONFIG["fold"]["freeze"] = 9

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def forked(act, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            act(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def in_a_step(step):
    original = Classifier.training_step
    def training_step(self, batch, batch_idx):
        if self.global_step == step:
            die()
        return original(self, batch, batch_idx)
    Classifier.training_step = training_step

def in_a_write(step):
    original = Trainer.save_checkpoint
    def save(self, path, *rest, **more):
        original(self, path, *rest, **more)
        if self.global_step == step:
            os.truncate(path, os.path.getsize(path) // 2)
            die()
    Trainer.save_checkpoint = save

def before_a_rename(step, name):
    original, seen = os.replace, []
    def replace(source, target):
        seen.append(Path(target).name)
        if Path(target).name == name and seen.count(name) == step // 6:
            die()
        original(source, target)
    run_checkpoint.os.replace = replace

def in_the_cache():
    original = torch.save
    def save(content, path, *rest, **more):
        original(content, path, *rest, **more)
        if str(path).endswith(".part") and "float_cache" in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            die()
    torch.save = save

def training(folder, patch=None, *arguments):
    if patch is not None:
        patch(*arguments)
    last = folder / "last.ckpt"
    train(copy.deepcopy(CONFIG), folder, checkpoint=last if last.is_file() else None, seed=0)

def float_training(folder, patch=None, *arguments):
    if patch is not None:
        patch(*arguments)
    config = copy.deepcopy(CONFIG) | {"run_root": str(folder / "root"), "resume": str(folder)}
    seed_everything(0, verbose=False)
    network = float_model.float_network(config, build_data(config["data"], 0), folder)
    torch.save(network.state_dict(), folder / "float.pt")

said = {"whole": [forked(training, place / "whole")], "float": [forked(float_training, place / "float")]}
for name, act, *how in (
    ("step", training, in_a_step, 8),
    ("write", training, in_a_write, 12),
    ("first_write", training, in_a_write, 6),
    ("best_written", training, before_a_rename, 12, "last.ckpt"),
    ("best_not_written", training, before_a_rename, 6, "best.ckpt"),
    ("float_step", float_training, in_a_step, 8),
    ("float_write", float_training, in_a_write, 12),
    ("float_cache", float_training, in_the_cache),
):
    folder = place / name
    folder.mkdir()
    said[name] = [forked(act, folder, *how), sorted(str(p.relative_to(folder)) for p in folder.rglob("*.ckpt")), forked(act, folder)]
folder = place / "result"
folder.mkdir()
said["result"] = [forked(lambda: (before_a_rename(6, "result.json"), write_result(folder, {"status": "ok"}))),
                  sorted(p.name for p in folder.iterdir()), forked(write_result, folder, {"status": "ok"})]
(place / "said.json").write_text(json.dumps(said))
"""
KILLED = -9


@pytest.fixture(scope="module")
def place(tmp_path_factory, pictures):
    place, here = tmp_path_factory.mktemp("killed"), Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(place), pictures]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return place


@pytest.fixture(scope="module")
def said(place):
    return json.loads((place / "said.json").read_text())


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(v, b[k]) if torch.is_tensor(v) else v == b[k] for k, v in a.items())


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("step", ["last.ckpt"]),
        ("write", ["last.ckpt"]),
        ("first_write", []),
        ("best_written", ["best.ckpt", "last.ckpt"]),
        ("best_not_written", ["last.ckpt"]),
    ],
)
def test_training(place, said, name, left):
    """Statistics freeze at step 9 of 18, 6 an epoch: the epoch that ends at step 12 is the first that can be the best."""
    assert said["whole"] == [0] and said[name] == [KILLED, left, 0]
    for file in ("last.ckpt", "best.ckpt"):
        whole, resumed = (torch.load(place / folder / file, weights_only=True) for folder in ("whole", name))
        assert whole["global_step"] == resumed["global_step"]
        assert same(whole["state_dict"], resumed["state_dict"]), file
    assert sorted(path.name for path in (place / name).iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("float_step", ["checkpoints/float.ckpt"]),
        ("float_write", ["checkpoints/float.ckpt"]),
        ("float_cache", ["checkpoints/float.ckpt"]),
    ],
)
def test_float_training(place, said, name, left):
    assert said["float"] == [0] and said[name] == [KILLED, left, 0]
    whole, resumed = (torch.load(place / folder / "float.pt", weights_only=True) for folder in ("float", name))
    assert same(whole, resumed)
    (cached,) = (place / name / "root" / "float_cache").glob("*.ckpt")
    assert same(torch.load(cached, weights_only=True)["state_dict"], whole)


def test_result(place, said):
    assert said["result"] == [KILLED, ["result.json.part"], 0]
    assert [path.name for path in (place / "result").iterdir()] == ["result.json"]
