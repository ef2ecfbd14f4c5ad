"""Gate: every strategy resumes at every step to the losses of the run that was never stopped; at the freeze it trains what it evaluates.

test_resume.py holds one strategy's optimizer, rates and checkpoints to the same standard.
"""

import copy

import pytest
import torch
from pytorch_lightning import Callback, seed_everything

import qat
from qat.train.callbacks import RngState
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.qat_training import schedule_callbacks
from qat.train.trainer import build_trainer, fit

FREEZE = 3  # of 6 steps, one epoch


class SaveEveryStep(Callback):
    def __init__(self, folder):
        self.folder, self.losses = folder, {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses[trainer.global_step] = outputs["loss"].item()
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class Compare(Callback):
    """Whether a step's training forward is the evaluation forward of the same network, by the optimizer steps done before it."""

    def __init__(self):
        self.same = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        trained, evaluated = (copy.deepcopy(pl_module.network).train(mode)(batch[0]) for mode in (True, False))
        self.same[trainer.global_step] = torch.equal(trained, evaluated)


def run(config, folder, save=None, checkpoint=None, seed=0, more=()):
    seed_everything(seed, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    saver = SaveEveryStep(save)
    trainer = build_trainer(config["trainer"], [*schedule_callbacks(config).values(), *more, saver, RngState()], [], folder, 6)
    fit(trainer, module, data, checkpoint)
    return module.network.state_dict(), saver.losses


@pytest.fixture
def config(config):
    config["trainer"] |= {"max_epochs": 1, "options": {"limit_val_batches": 0}}
    config["fold"]["freeze"] = FREEZE
    config["quant"] |= {"delay": 1, "freeze_ranges": 4}
    return config


@pytest.mark.parametrize(("strategy", "range"), list(zip(qat.STRATEGIES, ("minmax", "lsq") * 4)))
def test_every_strategy_resumes_at_every_step(config, tmp_path, strategy, range):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    state, losses = run(config, tmp_path, save=tmp_path)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    for step in (1, 2, 3, 4, 5):
        resumed, remaining = run(config, tmp_path, checkpoint=tmp_path / f"{step}.ckpt", seed=99)
        assert remaining == {at: loss for at, loss in losses.items() if at > step}, f"resumed at {step}"
        assert resumed.keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(value, resumed[key]), f"{key}, resumed at {step}"


@pytest.mark.parametrize(("strategy", "range"), list(zip(qat.STRATEGIES, ("lsq", "minmax") * 4)))
def test_the_first_frozen_step_trains_what_it_evaluates(config, tmp_path, strategy, range):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    config["quant"] |= {"delay": 0, "freeze_ranges": FREEZE}
    compare = Compare()
    run(config, tmp_path, more=[compare])
    assert [step for step, same in compare.same.items() if same] == [3, 4, 5]
