import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat.errors import QATError
from qat.train.callbacks import RunCheckpoint
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier, qat_config
from qat.train.trainer import build_trainer, fit


def plain(value):
    if isinstance(value, dict):
        return all(type(key) is str and plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, str) or (type(value) is list and all(map(plain, value)))


@pytest.fixture
def data(config):
    return build_data(config["data"], config["seed"])


@pytest.fixture
def module(config, data):
    torch.manual_seed(0)
    return Classifier(module_config(config, data))


def trained(config, data, module, folder):
    trainer = build_trainer({**config["trainer"], "max_epochs": 1}, [RunCheckpoint(folder)], [], folder, 6)
    fit(trainer, module, data)
    return trainer


def test_float_and_prepared(config, data):
    assert isinstance(Classifier(module_config(config, data)).network, qat.graph.prepared.QuantGraph)
    assert not hasattr(Classifier({**module_config(config, data), "quant": None}).network, "fold_report")


def test_a_given_network_is_prepared_with_its_weights(config, data):
    network = Classifier({**module_config(config, data), "quant": None}).network
    module = Classifier(module_config(config, data), network)
    x = torch.randn(3, *data.input_shape)
    qat.set_fake_quant(module.network, weights=False, activations=False)
    torch.testing.assert_close(module.eval()(x), network.eval()(x), atol=1e-5, rtol=1e-5)


def test_recipe_values_reach_the_config(config):
    config["quant"]["weight"] |= {"bits": 4, "per_channel": False, "range": "mse"}
    made = qat_config(config["quant"], config["fold"])
    assert (made.fold, made.weight, made.weight_range) == ("bn_correction", qat.QuantSpec(bits=4, per_channel=False), "mse")


def test_a_checkpoint_holds_plain_containers_and_loads_in_a_new_process(config, data, module, tmp_path):
    trainer = trained(config, data, module, tmp_path)
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert plain(saved["hyper_parameters"])
    again = Classifier.load_from_checkpoint(tmp_path / "best.ckpt", weights_only=True)
    for key, value in module.network.state_dict().items():
        other = again.network.state_dict()[key]
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other, key
    (test,) = trainer.test(datamodule=data, ckpt_path="best", weights_only=True, verbose=False)
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import torch\nfrom qat.train.module import Classifier\n"
        "network = Classifier.load_from_checkpoint(sys.argv[1], weights_only=True).eval()\n"
        "print(network(torch.linspace(-1, 1, 64).view(1, 1, 8, 8)).tolist())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "best.ckpt"), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    mine = again.eval()(torch.linspace(-1, 1, 64).view(1, 1, 8, 8))
    torch.testing.assert_close(torch.tensor(eval(done.stdout)), mine, rtol=0, atol=1e-6)
    other = build_trainer(config["trainer"], [RunCheckpoint(tmp_path)], [], tmp_path, 6)
    (fresh,) = other.test(Classifier(module_config(config, data)), datamodule=data, ckpt_path=str(tmp_path / "best.ckpt"), verbose=False)
    assert fresh == test


def test_labels_out_of_range_are_named_before_the_first_step(module, tmp_path):
    batches = DataLoader(TensorDataset(torch.zeros(8, 1, 8, 8), torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])), batch_size=8)
    trainer = build_trainer({"max_epochs": 1, "accelerator": "cpu"}, [], [], tmp_path, 1)
    with pytest.raises(QATError, match="labels from 0 to 7; expected labels from 0 to 3"):
        trainer.fit(module, batches)


def test_label_smoothing(module, data):
    images, labels = next(iter(data.val_dataloader()))
    module.eval().log = lambda *args, **kwargs: None
    expected = torch.nn.functional.cross_entropy(module(images), labels, label_smoothing=0.2)
    module.config["optim"] = {**module.config["optim"], "label_smoothing": 0.2}
    torch.testing.assert_close(module.training_step((images, labels), 0), expected)
