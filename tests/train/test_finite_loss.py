"""NaN and wrong labels in the middle of a run: one line, and nothing of it in a checkpoint."""

import pytest
import torch
from pytorch_lightning import Callback, seed_everything
from torch.utils.data import DataLoader, TensorDataset

import qat
from qat.errors import QATError
from qat.train.callbacks import FiniteLoss, FreezeRanges, RunCheckpoint
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.trainer import build_trainer, fit


class Spoil(Callback):
    """Puts `value` into one pixel of the batch of step `step`, counted from 0."""

    def __init__(self, step, value):
        self.step, self.value = step, value

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            batch[0][3, 0, 2, 2] = self.value


def run(config, folder, *callbacks, quant=True, checkpoint=None):
    seed_everything(0, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier({**module_config(config, data), **({} if quant else {"quant": None})})
    if quant:
        qat.calibrate(module.network, data.calibration_batches(2))
    trainer = build_trainer(config["trainer"], [FiniteLoss(), *callbacks, RunCheckpoint(folder)], [], folder, 6)
    fit(trainer, module, data, checkpoint)
    return module


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_a_spoiled_batch_stops_the_run_and_the_checkpoint_is_from_before(config, tmp_path, strategy):
    config["fold"]["name"] = strategy
    config["trainer"]["log_every_n_steps"] = 4
    with pytest.raises(QATError, match=r"^step 10: found a loss of NaN or Inf, first met by quantizers\.input") as caught:
        run(config, tmp_path, Spoil(9, float("nan")))
    assert "detect_anomaly" in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".ckpt"] == []
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 6
    assert all(torch.isfinite(v).all() for v in saved["state_dict"].values() if torch.is_tensor(v))


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_an_infinite_pixel_is_clipped_and_counted(config, tmp_path, strategy):
    """The range of the input leaves the batch out, its quantizer clips the pixel: the loss stays finite and so does the network."""
    config["fold"]["name"] = strategy
    module = run(config, tmp_path, Spoil(9, float("inf")))
    assert all(torch.isfinite(v).all() for v in module.state_dict().values() if torch.is_tensor(v))
    counts = [int(m.nonfinite_batches) for name, m in module.network.named_modules() if name.startswith("quantizers.")]
    assert counts[0] == 1 and not any(counts[1:])


def test_where_no_range_moves_the_first_spoiled_tensor_is_named(config, tmp_path):
    with pytest.raises(QATError, match=r"^step 3: found a loss of NaN or Inf, which 0\.conv\.weight holds"):
        run(config, tmp_path, FreezeRanges(0), Spoil(2, float("nan")))
    assert not list(tmp_path.glob("*.ckpt*"))


def test_the_float_network_too(config, tmp_path):
    with pytest.raises(QATError, match=r"^step 6: found a loss of NaN or Inf, which 0\.weight holds"):
        run(config, tmp_path, Spoil(5, float("nan")), quant=False)
    assert not list(tmp_path.glob("*.ckpt*"))


def test_a_sound_run_is_left_alone_and_a_spoiled_one_goes_on_from_its_checkpoint(config, tmp_path):
    whole = run(config, tmp_path / "a")
    with pytest.raises(QATError, match="step 16"):
        run(config, tmp_path / "b", Spoil(15, float("nan")))
    again = run(config, tmp_path / "b", checkpoint=tmp_path / "b" / "last.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), again.parameters(), strict=True))


def test_steps_do_not_read_the_device(config, tmp_path):
    """A number is read back to Python with `aten::_local_scalar_dense`."""
    from types import SimpleNamespace

    callback = FiniteLoss()
    module = SimpleNamespace(network=torch.nn.Identity(), device=torch.device("cpu"))
    callback.on_train_start(None, module)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        callback.on_train_batch_end(SimpleNamespace(global_step=1, log_every_n_steps=2), module, {"loss": torch.ones(())}, None, 0)
    assert "aten::_local_scalar_dense" not in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("stage", ["training", "validation"])
def test_labels_out_of_range_in_a_later_batch(config, tmp_path, stage):
    labels = torch.arange(16) % 4
    spoiled = labels.index_fill(0, torch.tensor([12]), 4)
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loaders = [
        DataLoader(TensorDataset(images, y), batch_size=4) for y in ((spoiled, labels) if stage == "training" else (labels, spoiled))
    ]
    module = Classifier(module_config(config, build_data(config["data"], 0)))
    trainer = build_trainer({"max_epochs": 1, "accelerator": "cpu"}, [], [], tmp_path, 4)
    with pytest.raises(QATError, match="labels from 1 to 4; expected labels from 0 to 3"):
        trainer.fit(module, *loaders)
    assert trainer.global_step == (3 if stage == "training" else 4)
