"""Lightning's sanity check and validation move no range and no statistic, for any strategy."""

import pytest
import torch
from pytorch_lightning import Callback, seed_everything

import qat
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.trainer import build_trainer, fit


class States(Callback):
    """Copies of the network's state before and after each evaluation."""

    def __init__(self):
        self.pairs = []

    def keep(self, pl_module):
        return {key: value.clone() for key, value in pl_module.network.state_dict().items()}

    def on_validation_start(self, trainer, pl_module):
        self.pairs.append([self.keep(pl_module)])

    def on_validation_end(self, trainer, pl_module):
        self.pairs[-1].append(self.keep(pl_module))


@pytest.mark.parametrize(("strategy", "range"), list(zip(qat.STRATEGIES, ("minmax", "lsq") * 4)))
def test_evaluation_inside_a_run(config, tmp_path, strategy, range):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    config["trainer"] |= {"max_epochs": 1, "options": {"num_sanity_val_steps": 1}}
    seed_everything(0, verbose=False)
    data, states = build_data(config["data"], 0), States()
    module = Classifier(module_config(config, data))
    fit(build_trainer(config["trainer"], [states], [], tmp_path, 6), module, data)
    assert len(states.pairs) == 2  # the sanity check, before any range exists, and the epoch's end
    assert not torch.equal(states.pairs[0][1]["quantizers.input_1.scale"], states.pairs[1][0]["quantizers.input_1.scale"])
    for before, after in states.pairs:
        assert all(torch.equal(value, after[key]) for key, value in before.items())
