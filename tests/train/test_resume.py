"""A run that is stopped and resumed is the run that was never stopped, bit by bit."""

import pytest
import torch
from pytorch_lightning import Callback, seed_everything

import qat
from qat.train.callbacks import RngState, RunCheckpoint, StopSignal
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.qat_training import schedule_callbacks
from qat.train.trainer import build_trainer, fit

FREEZE = 9  # of 18 steps, 6 an epoch


class StopAt(Callback):
    def __init__(self, step, stop):
        self.step, self.stop = step, stop

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            self.stop.requested = True


class Record(Callback):
    def __init__(self):
        self.rates, self.losses = {}, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.rates[trainer.global_step] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.global_step] = outputs["loss"].item()


def train(config, folder, stop_at=None, checkpoint=None, seed=0):
    seed_everything(seed, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    schedule, stop, record = schedule_callbacks(config), StopSignal(), Record()
    saver = RunCheckpoint(folder, [schedule["delay"], schedule["freeze_bn"]], stop)
    trainer = build_trainer(config["trainer"], [*schedule.values(), record, StopAt(stop_at, stop), RngState(), stop, saver], [], folder, 6)
    if stop_at is None:
        fit(trainer, module, data, checkpoint)
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(trainer, module, data)
    return module, trainer, schedule, record, saver


def assert_same(a, b, where=""):
    if torch.is_tensor(a):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}[{i}]")
    else:
        assert a == b, where


@pytest.fixture
def config(config):
    config["model"]["options"] = {"dropout": 0.3}
    config["fold"]["freeze"] = FREEZE
    config["quant"] |= {"delay": 3, "freeze_ranges": 14}
    return config


# in an epoch before, just before, at and after the freeze; at the ends of epochs; before quantization and after the ranges
@pytest.mark.parametrize("stop_at", [2, 6, 8, FREEZE, 10, 12, 15])
def test_resume_is_bit_identical(config, tmp_path, stop_at):
    whole = train(config, tmp_path / "a")
    train(config, tmp_path / "b", stop_at=stop_at)
    saved = torch.load(tmp_path / "b" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == stop_at
    resumed = train(config, tmp_path / "b", checkpoint=tmp_path / "b" / "last.ckpt", seed=99)
    assert min(resumed[3].losses) == stop_at + 1
    assert {step: loss for step, loss in whole[3].losses.items() if step > stop_at} == resumed[3].losses
    assert {step: rate for step, rate in whole[3].rates.items() if step >= stop_at} == resumed[3].rates
    assert_same(whole[0].state_dict(), resumed[0].state_dict())
    assert_same(whole[1].optimizers[0].state_dict(), resumed[1].optimizers[0].state_dict())
    assert (whole[2]["freeze_bn"].frozen_at, whole[1].global_step) == (FREEZE, 18)
    assert (resumed[2]["freeze_bn"].frozen_at, resumed[1].global_step) == (FREEZE, 18)
    assert (whole[4].best_score, whole[4].best_step) == (resumed[4].best_score, resumed[4].best_step)
    for name in ("best.ckpt", "last.ckpt"):
        a, b = (torch.load(tmp_path / folder / name, weights_only=True) for folder in "ab")
        assert_same(a["state_dict"], b["state_dict"], name)


@pytest.mark.parametrize("stop_at", [4, 8])
def test_auto_freeze_with_learned_scales_resumes_the_same(config, tmp_path, stop_at):
    config["fold"] |= {"freeze": "auto", "drift_bound": 0.3, "reestimate_before_freeze": 2, "reestimate_before_eval": 2}
    config["quant"]["delay"] = 0
    config["quant"]["weight"]["range"] = config["quant"]["activation"]["range"] = "lsq"
    whole = train(config, tmp_path / "a")
    train(config, tmp_path / "b", stop_at=stop_at)
    resumed = train(config, tmp_path / "b", checkpoint=tmp_path / "b" / "last.ckpt", seed=99)
    assert whole[2]["freeze_bn"].frozen_at == resumed[2]["freeze_bn"].frozen_at is not None
    assert_same(whole[0].state_dict(), resumed[0].state_dict())
    assert_same(whole[1].optimizers[0].state_dict(), resumed[1].optimizers[0].state_dict())


def test_workers_change_nothing(config, tmp_path):
    config["trainer"]["max_epochs"] = 2
    config["fold"]["freeze"] = FREEZE
    config["quant"]["freeze_ranges"] = None
    whole = train(config, tmp_path / "a")
    train(config, tmp_path / "b", stop_at=8)
    config["data"]["workers"] = 1
    resumed = train(config, tmp_path / "b", checkpoint=tmp_path / "b" / "last.ckpt", seed=99)
    assert_same(whole[0].state_dict(), resumed[0].state_dict())
