import logging
import re
import signal

import pytest
import torch
from pytorch_lightning import Callback, seed_everything

import qat
from qat.errors import ConfigError, QATError
from qat.quant import FakeQuantizer
from qat.train.callbacks import EpochLine, FreezeBN, FreezeRanges, QuantDelay, Reestimate, RunCheckpoint, StopSignal
from qat.train.callbacks.auto_freeze import AutoFreeze
from qat.train.callbacks.drift import freezable, largest_drift, layer_drifts
from qat.train.callbacks.epoch_line import HEADER, clock, line
from qat.train.data import build_data
from qat.train.job import module_config
from qat.train.module import Classifier
from qat.train.trainer import build_trainer, fit


class Spy(Callback):
    """What the network looked like in the forward of each step: {optimizer steps done before it: value}."""

    def __init__(self, look):
        self.look, self.seen = look, {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen[trainer.global_step] = self.look(trainer, pl_module.network)


def run(config, folder, *callbacks):
    seed_everything(0, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    trainer = build_trainer(config["trainer"], callbacks, [], folder, 6)
    fit(trainer, module, data)
    return module, trainer


def frozen(trainer, network):
    return not freezable(network)


def enabled(trainer, network):
    return {m.enabled for m in network.modules() if isinstance(m, FakeQuantizer)}


def test_quantization_starts_at_its_step(config, tmp_path):
    spy = Spy(enabled)
    run(config, tmp_path, QuantDelay(4), spy)
    assert [spy.seen[step] for step in (0, 3, 4, 17)] == [{False}, {False}, {True}, {True}]


@pytest.mark.parametrize("delay", [0, None])
def test_no_delay(config, tmp_path, delay):
    config["trainer"]["max_epochs"] = 1
    spy = Spy(enabled)
    run(config, tmp_path, QuantDelay(delay), spy)
    assert set(map(str, spy.seen.values())) == {"{True}"}


@pytest.mark.parametrize(("at", "step"), [(7, 7), (0.5, 9), (0, 0)])
def test_freeze_at_a_step_or_share(config, tmp_path, at, step):
    freeze = FreezeBN(at, lr_factor=0.01)
    spy = Spy(frozen)
    rates = Spy(lambda trainer, network: trainer.optimizers[0].param_groups[0]["lr"])
    config["optim"] = {**config["optim"], "schedule": "constant"}
    run(config, tmp_path, freeze, spy, rates)
    assert freeze.frozen_at == step
    assert [s for s, is_frozen in spy.seen.items() if is_frozen] == list(range(step, 18))
    assert list(rates.seen.values()) == pytest.approx([0.05] * step + [0.0005] * (18 - step))


def test_frozen_statistics_stay(config, tmp_path):
    statistics = Spy(lambda trainer, network: torch.cat([m.running_mean.clone() for m in network.modules() if hasattr(m, "running_mean")]))
    run(config, tmp_path, FreezeBN(5), statistics)
    assert not torch.equal(statistics.seen[4], statistics.seen[5])
    assert all(torch.equal(statistics.seen[5], statistics.seen[step]) for step in range(6, 18))


@pytest.mark.parametrize("name", ["static", "frozen"])
def test_without_a_live_bn_there_is_no_freeze_and_no_lower_rate(config, tmp_path, name):
    config["fold"]["name"] = name
    config["optim"] = {**config["optim"], "schedule": "constant"}
    config["trainer"]["max_epochs"] = 1
    freeze = FreezeBN(2, lr_factor=0.01)
    _, trainer = run(config, tmp_path, freeze)
    assert (freeze.frozen_at, freeze.done) == (None, True)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.05


def test_never(config, tmp_path):
    freeze = FreezeBN(None)
    module, _ = run(config, tmp_path, freeze)
    assert (freeze.frozen_at, freeze.done) == (None, True) and freezable(module.network)


def test_beyond_the_run(config, tmp_path):
    with pytest.raises(ConfigError, match=r"fold\.freeze: found step 18 of a run of 18 steps"):
        run(config, tmp_path, FreezeBN(18))


def test_the_log_names_layers_whose_statistics_differ(config, tmp_path, caplog):
    class Shift(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            layer = next(iter(freezable(pl_module.network).values()), None)
            if layer is not None and trainer.global_step == 5:
                layer.bn.running_mean += 100

    with caplog.at_level(logging.INFO, logger="qat"):
        run(config, tmp_path, Shift(), FreezeBN(6))
    warning = next(record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert re.search(r"layers froze with a drift above 0\.5 .*: 0 mean 1\d\d\.\d\d \(max [\d.]+\) sigma", warning)
    assert "step 6: BN statistics of 2 layers frozen, learning rate x 0.1" in caplog.text


def test_reestimation_before_the_freeze_removes_the_drift(config, tmp_path, caplog):
    class Shift(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            for layer in freezable(pl_module.network).values():
                layer.bn.running_mean += 100

    with caplog.at_level(logging.INFO, logger="qat"):
        module, _ = run(config, tmp_path, Shift(), FreezeBN(6, reestimate=3))
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]
    assert all(m.running_mean.abs().max() < 50 for m in module.network.modules() if hasattr(m, "running_mean"))


def test_drift_is_that_of_the_last_batch(config):
    data = build_data(config["data"], 0)
    network = Classifier(module_config(config, data)).network.train()
    assert layer_drifts(network) == [] and largest_drift(network) is None
    layers = freezable(network)
    network(data.calibration_batches(1)[0])
    drifts = {drift.name: drift for drift in layer_drifts(network)}
    assert drifts.keys() == layers.keys()
    for name, layer in layers.items():
        sigma = (layer.bn.running_var + layer.bn.eps).sqrt()
        expected = ((layer.batch_mean - layer.bn.running_mean).abs() / sigma).mean()
        assert drifts[name].mean == pytest.approx(float(expected), rel=1e-4)
        assert drifts[name].mean_max >= drifts[name].mean
    assert largest_drift(network) == pytest.approx(max(drift.size for drift in drifts.values()))
    qat.freeze_bn(network)
    assert largest_drift(network) is None


def test_auto_freezes_when_statistics_agree_and_quantization_is_on(config, tmp_path):
    delay = QuantDelay(6)
    freeze = FreezeBN("auto", bound=100.0, delay=delay)
    run(config, tmp_path, delay, freeze)
    assert freeze.frozen_at == 7
    freeze = FreezeBN("auto", bound=0.0)
    run(config, tmp_path, freeze)
    assert freeze.frozen_at == 16


def test_auto_measures_each_optimizer_step_once(config, tmp_path, monkeypatch):
    config["trainer"]["options"] = {"accumulate_grad_batches": 3}
    steps = []
    monkeypatch.setattr(AutoFreeze, "update", lambda self, step, drift: bool(steps.append(step)))
    freeze = FreezeBN("auto", bound=0.0)
    run(config, tmp_path, freeze)
    assert steps == list(range(1, freeze.frozen_at + 1))


def test_ranges_freeze_at_their_step(config, tmp_path):
    spy = Spy(lambda trainer, network: {m.observing for m in network.modules() if isinstance(m, FakeQuantizer) and m.running})
    run(config, tmp_path, FreezeRanges(5), spy)
    assert [spy.seen[step] for step in (0, 4, 5, 17)] == [{True}, {True}, {False}, {False}]


def test_reestimation_before_evaluation_leaves_training_alone(config, tmp_path):
    class Look(Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            self.seen = {key: value.clone() for key, value in pl_module.network.state_dict().items() if "running" in key}

    look = Look()
    plain, _ = run(config, tmp_path)
    evaluated, _ = run(config, tmp_path, Reestimate(2), look)
    for key, value in plain.network.state_dict().items():
        other = evaluated.network.state_dict()[key]
        assert torch.equal(value, other) if torch.is_tensor(value) else value == other, key
    last = evaluated.network.state_dict()
    assert any(not torch.equal(value, last[key]) for key, value in look.seen.items())


def test_reestimation_needs_training_pictures(config, tmp_path):
    data = build_data(config["data"], 0)
    module = Classifier(module_config(config, data))
    trainer = build_trainer(config["trainer"], [Reestimate(2)], [], tmp_path, 6)
    with pytest.raises(QATError, match="calibration_batches"):
        trainer.fit(module, data.train_dataloader(), data.val_dataloader())


def test_only_epochs_after_the_schedule_can_be_best(config, tmp_path):
    freeze = FreezeBN(13)
    checkpoint = RunCheckpoint(tmp_path, [freeze])
    run(config, tmp_path, freeze, checkpoint)
    assert checkpoint.best_step == 18
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_equal_scores_keep_the_earlier_epoch(config, tmp_path):
    config["optim"] = {**config["optim"], "lr": 0.0}
    config["fold"]["name"] = "frozen"
    config["quant"]["activation"]["range"] = "minmax"
    checkpoint = RunCheckpoint(tmp_path)
    run(config, tmp_path, FreezeRanges(0), checkpoint)
    assert checkpoint.best_step == 6


@pytest.fixture
def heard():
    """Ctrl-C as in a terminal: a shell starts what runs in the background with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class PressCtrlC(Callback):
    def __init__(self, step, times=1):
        self.step, self.times = step, times

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("step", [7, 11])
def test_ctrl_c_saves_after_the_running_step(config, tmp_path, step):
    handler = signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, PressCtrlC(step), stop, RunCheckpoint(tmp_path, stop=stop))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == step + 1
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.usefixtures("heard")
def test_a_second_ctrl_c_stops_at_once(config, tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path, PressCtrlC(7, times=2), stop, RunCheckpoint(tmp_path, stop=stop))
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 6
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_epoch_line_is_aligned_with_its_header(config, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="qat"):
        run(config, tmp_path, EpochLine(float_accuracy=0.9))
    rows = [record.message for record in caplog.records if record.name.endswith("epoch_line")]
    assert rows[0].split() == ["epoch", "lr", "loss", "float", "fakeq", "d", "time", "eta"]
    assert len(rows) == 4 and {len(row) for row in rows} == {len(HEADER)}
    assert rows[3].split()[0] == "3/3" and rows[3].split()[3] == "0.9000" and rows[3].split()[-1] == "0:00"


def test_line_and_clock():
    assert line(1, 10, 0.01, 1.25, 0.9, None, 61, 3661).split() == ["1/10", "1.00e-02", "1.2500", "0.9000", "-", "-", "1:01", "1:01:01"]
    assert line(1, 10, 0.01, 1.25, 0.9, 0.85, 5, 0).split()[5] == "-0.0500"
    assert clock(59.6) == "1:00"
