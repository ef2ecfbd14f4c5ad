"""Gradient clipping and accumulation in a run, against the same steps by hand."""

import copy

import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from torch.nn.functional import cross_entropy

import qat
from qat.train.callbacks import FreezeBN, FreezeRanges, QuantDelay
from qat.train.callbacks.drift import freezable
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.trainer import build_trainer, fit

LR = 0.05


class Batches(Callback):
    """The batches the run trains on."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(copy.deepcopy(batch))


def run(config, folder, **options):
    """(network before, network after, batches) of a run of plain gradient descent."""
    config["optim"] = {**config["optim"], "momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": LR}
    config["trainer"] |= {"options": {k: v for k, v in options.items() if k not in config["trainer"]}, "max_epochs": 1}
    config["trainer"] |= {k: v for k, v in options.items() if k in config["trainer"]}
    seed_everything(0, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    before, batches = copy.deepcopy(module.network), Batches()
    fit(build_trainer(config["trainer"], [batches], [], folder, 6), module, data)
    return before.train(), module.network, batches.seen


def by_hand(network, batches, accumulate=1, clip=lambda parameters: None):
    for at in range(0, len(batches), accumulate):
        part = batches[at : at + accumulate]
        for images, labels in part:
            # Lightning divides by the number it was asked to accumulate, also where an epoch ends before.
            (cross_entropy(network(images), labels) / accumulate).backward()
        clip(network.parameters())
        with torch.no_grad():
            for p in network.parameters():
                p -= LR * p.grad
                p.grad = None


def assert_same(network, other):
    for name, value in network.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=name)


def norm(parameters):
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]))


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_the_norm_of_all_gradients_is_clipped(config, tmp_path, strategy):
    config["fold"]["name"] = strategy
    before, after, batches = run(config, tmp_path, gradient_clip_val=0.05, limit_train_batches=2)
    clipped = []

    def clip(parameters):
        parameters = list(parameters)
        size = norm(parameters)
        clipped.append(float(size) > 0.05)
        for p in parameters:
            p.grad.mul_(min(1.0, 0.05 / (float(size) + 1e-6)))

    by_hand(before, batches, clip=clip)
    assert clipped == [True, True]
    assert_same(before, after)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_each_gradient_is_clipped(config, tmp_path, strategy):
    config["fold"]["name"] = strategy
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "limit_train_batches": 2}
    before, after, batches = run(config, tmp_path, **options)
    by_hand(before, batches, clip=lambda parameters: [p.grad.clamp_(-0.01, 0.01) for p in parameters])
    assert_same(before, after)


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_gradients_of_several_batches_make_one_step(config, tmp_path, strategy):
    """The statistics and ranges move at every batch, the weights at every second."""
    config["fold"]["name"] = strategy
    before, after, batches = run(config, tmp_path, accumulate_grad_batches=2, limit_train_batches=4)
    by_hand(before, batches, accumulate=2)
    assert_same(before, after)


def test_the_schedule_counts_optimizer_steps(config, tmp_path):
    """18 batches, three to a step: at step 2 of 6 six batches have moved the statistics, and no later one does."""
    config["trainer"]["options"] = {"accumulate_grad_batches": 3}
    seed_everything(0, verbose=False)
    data = build_data(config["data"], 0)
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    norms = [layer.bn for layer in freezable(module.network).values()]
    freeze, delay, ranges = FreezeBN(2), QuantDelay(1), FreezeRanges(4)
    trainer = build_trainer(config["trainer"], [delay, freeze, ranges], [], tmp_path, 6)
    fit(trainer, module, data)
    assert (trainer.global_step, freeze.frozen_at) == (6, 2)
    assert [int(bn.num_batches_tracked) for bn in norms] == [6, 6]
    quantizer = next(m for name, m in module.network.named_modules() if name.startswith("quantizers."))
    assert int(quantizer.batches) == 2 + 12
