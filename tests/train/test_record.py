import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning import Callback, seed_everything

import qat
from qat.fold.arithmetic import fold_weight, out_first, sigma
from qat.quant import FakeQuantizer
from qat.report.layers import read_layers
from qat.report.result import read_result
from qat.train.callbacks import FreezeBN, QuantDelay, Record
from qat.train.callbacks.range_ends import range_ends
from qat.train.callbacks.record import moments_of
from qat.train.callbacks.weight_codes import WeightCodes, changed, quantized_layers
from qat.train.data import build_data
from qat.train.job import module_config, run_job
from qat.train.module import Classifier
from qat.train.qat_training import schedule_callbacks
from qat.train.trainer import build_trainer, fit

ALL = 1000  # moments: every step
LAYERS = ["0", "3", "9"]  # of tiny_networks:tiny, the last without a BatchNorm


class SaveEveryStep(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.{batch_idx}.ckpt")


def run(config, folder, *callbacks, checkpoint=None, seed=0, options=None):
    seed_everything(seed, verbose=False)
    data = build_data(config["data"], config["seed"])
    module = Classifier(module_config(config, data))
    qat.calibrate(module.network, data.calibration_batches(2))
    settings = {**config["trainer"], "options": options or {}}
    trainer = build_trainer(settings, callbacks, [], folder, 6)
    fit(trainer, module, data, checkpoint)
    return module.network


@pytest.fixture
def config(config):
    config["trainer"]["max_epochs"] = 1
    return config


@pytest.mark.parametrize(
    ("total", "count", "steps"),
    [(18, 0, []), (1, 60, []), (2, 60, [1]), (18, 1, [17]), (18, 3, [1, 9, 17]), (5, 60, [1, 2, 3, 4]), (0, 60, [])],
)
def test_moments_are_spread_over_the_run(total, count, steps):
    assert moments_of(total, count) == steps


def test_there_are_never_more_moments_than_asked_for():
    for total in range(2, 200, 7):
        found = moments_of(total, 60)
        assert len(found) == min(60, total - 1) and found[0] >= 1 and found[-1] == total - 1


@pytest.mark.parametrize(("strategy", "range"), [(s, r) for s in qat.STRATEGIES for r in ("minmax", "lsq")])
def test_recording_changes_no_bit_of_a_run(config, tmp_path, strategy, range):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    record = Record(ALL)
    watched = run(config, tmp_path, record, FreezeBN(3))
    alone = run(config, tmp_path, Record(0), FreezeBN(3))
    for key, value in alone.state_dict().items():
        assert torch.equal(value, watched.state_dict()[key]), key
    assert record.history["jitter"]["steps"] == [1, 2, 3, 4, 5] == record.history["ranges"]["steps"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in watched.modules())
    # the freeze at the end of step 3 stops the statistics: from the pair after it on they change no code
    by_statistics = record.history["jitter_statistics"]["layers"]
    assert all(shares[3:] == [0, 0] for shares in by_statistics.values()), by_statistics


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_codes_are_those_of_the_training_forward(config, tmp_path, strategy):
    """Against the weight that a second, unwatched quantizer sees."""
    config["fold"]["name"] = strategy
    network = run(config, tmp_path, Record(0)).train()
    network.requires_grad_(True)
    layers = quantized_layers(network)
    weights, running = {}, {name: layer.sigma.clone() for name, layer in layers.items() if layer.keeps_bn}

    def see(name):
        return lambda quantizer, inputs: weights.__setitem__(name, inputs[0].detach().clone())

    for name, layer in layers.items():
        layer.weight_quantizer.register_forward_pre_hook(see(name))
    watched = WeightCodes(layers, {})
    network(torch.randn(16, 1, 8, 8))
    watched.close()
    for name, layer in layers.items():
        assert torch.equal(watched.codes[name].int(), layer.weight_quantizer.codes(weights[name])), name
        used = watched.used()[name]
        if strategy in ("static", "scale_merge") or not layer.keeps_bn:
            assert used is None
        else:
            torch.testing.assert_close(fold_weight(out_first(layer.conv.weight, layer.conv), layer.gamma, used), weights[name])
            batch = sigma(layer.batch_var, layer.bn.eps)
            assert torch.equal(used, batch if strategy == "naive" else used if strategy == "batch_renorm" else running[name])


def at_rest(config, tmp_path, strategy, per_channel):
    """Jitter of a run whose float weights do not move."""
    config["fold"]["name"], config["quant"]["weight"]["per_channel"] = strategy, per_channel
    config["optim"] = {**config["optim"], "lr": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    record = Record(ALL)
    run(config, tmp_path, record)
    return {key: {name: record.history[key]["layers"][name] for name in LAYERS} for key in ("jitter", "jitter_statistics")}


def test_weights_at_rest_jitter_by_the_statistics_alone(config, tmp_path):
    per_channel = at_rest(config, tmp_path, "naive", True)["jitter"]
    assert {share for shares in per_channel.values() for share in shares} == {0.0}
    per_tensor = at_rest(config, tmp_path, "naive", False)
    for name in ("0", "3"):
        assert all(share > 0 for share in per_tensor["jitter"][name]), name
    assert per_tensor["jitter"] == per_tensor["jitter_statistics"]
    assert set(per_tensor["jitter"]["9"]) == {0.0}
    corrected = at_rest(config, tmp_path, "bn_correction", False)
    assert sum(map(sum, corrected["jitter"].values())) < sum(map(sum, per_tensor["jitter"].values())) / 3
    assert {share for shares in at_rest(config, tmp_path, "frozen", False)["jitter"].values() for share in shares} == {0.0}


def test_a_reestimation_at_the_freeze_does_not_mix_with_the_batch(config, tmp_path):
    """Of weights at rest the statistics explain every changed code, also from the last moving batch to the first frozen one."""
    config["quant"]["weight"]["per_channel"] = False
    config["fold"] |= {"name": "naive", "freeze": 3, "reestimate_before_freeze": 2}
    config["optim"] = {**config["optim"], "lr": 0.0, "weight_decay": 0.0, "schedule": "constant"}
    config["report"]["moments"] = ALL
    schedule = schedule_callbacks(config)
    run(config, tmp_path, *schedule.values())
    history = schedule["record"].history
    assert schedule["freeze_bn"].frozen_at == 3 and history["jitter"]["steps"] == [1, 2, 3, 4, 5]
    assert history["jitter"] == history["jitter_statistics"]
    for name in ("0", "3"):
        shares = history["jitter"]["layers"][name]
        assert all(share > 0 for share in shares[:3]) and shares[3:] == [0, 0], name


def test_naive_jitters_more_than_the_correction(config, tmp_path):
    config["quant"]["weight"]["per_channel"] = False
    means = {}
    for strategy in ("naive", "bn_correction"):
        config["fold"]["name"] = strategy
        record = Record(ALL)
        run(config, tmp_path, record)
        for key in ("jitter", "jitter_statistics"):
            shares = [share for name in ("0", "3") for share in record.history[key]["layers"][name]]
            means[strategy, key] = sum(shares) / len(shares)
    assert means["naive", "jitter"] > 1.2 * means["bn_correction", "jitter"]
    assert means["naive", "jitter_statistics"] > 3 * means["bn_correction", "jitter_statistics"]
    assert 0 < means["bn_correction", "jitter_statistics"] < means["bn_correction", "jitter"]


class SwitchOff(Callback):
    """The quantizer of the first layer's weight is off before step 3."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.network.get_submodule("0").weight_quantizer.enabled = trainer.global_step >= 3


def test_what_is_not_quantized_has_no_jitter(config, tmp_path):
    delayed = Record(ALL)
    run(config, tmp_path, delayed, QuantDelay(3))
    assert delayed.history["jitter"]["steps"] == delayed.history["jitter_statistics"]["steps"] == [4, 5]
    assert all(len(shares) == 2 and None not in shares for shares in delayed.history["jitter"]["layers"].values())
    assert delayed.history["ranges"]["steps"] == [1, 2, 3, 4, 5]
    record = Record(ALL)
    run(config, tmp_path, record, SwitchOff())
    for key in ("jitter", "jitter_statistics"):
        layers = record.history[key]["layers"]
        assert layers["0"][:3] == [None] * 3 and None not in layers["0"][3:] + layers["3"] + layers["9"], key


class Copies(Callback):
    """The network as it was when the first batch of each step came."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.setdefault(trainer.global_step, copy.deepcopy(pl_module.network))


@pytest.mark.parametrize(
    ("strategy", "range"), [("naive", "minmax"), ("scale_merge", "minmax"), ("batch_renorm", "lsq"), ("static", "mse")]
)
def test_ranges_are_those_that_would_be_shipped(config, tmp_path, strategy, range):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    config["quant"]["activation"]["range"] = "lsq" if range == "lsq" else "ema"
    record, copies = Record(3), Copies()
    run(config, tmp_path, record, copies)
    ranges = record.history["ranges"]
    assert ranges["steps"] == [1, 3, 5]
    for at, step in enumerate(ranges["steps"]):
        network = copies.seen[step].eval()
        for name, layer in quantized_layers(network).items():
            scale, row = layer.integer()[1], ranges["tensors"][f"{name}.weight_quantizer"]
            top = layer.weight_quantizer.spec.qmax * float(scale.max())
            expected = [float(scale.min()), float(scale.max()), -top, top]
            assert [row[end][at] for end in ("scale_low", "scale_high", "low", "high")] == pytest.approx(expected, rel=1e-6)
        quantizers = {name: m for name, m in network.named_modules() if isinstance(m, FakeQuantizer) and name.startswith("quantizers.")}
        assert quantizers and len(ranges["tensors"]) == len(quantizers) + len(LAYERS)
        for name, quantizer in quantizers.items():
            ends = quantizer(torch.tensor([-1e9, 1e9])).tolist()
            assert [ranges["tensors"][name][end][at] for end in ("low", "high")] == pytest.approx(ends, rel=1e-5), name


@pytest.mark.parametrize(("strategy", "range"), [("naive", "minmax"), ("batch_renorm", "lsq")])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resumed_run_keeps_its_record(config, tmp_path, strategy, range, accumulate):
    config["fold"]["name"], config["quant"]["weight"]["range"] = strategy, range
    config["quant"]["weight"]["per_channel"] = False
    config["trainer"]["max_epochs"] = 2
    options = {"accumulate_grad_batches": accumulate}
    whole = Record(4)
    run(config, tmp_path, whole, SaveEveryStep(tmp_path), options=options)
    assert len(whole.history["jitter"]["steps"]) == 4
    # Lightning resumes between two optimizer steps
    between = [path for path in sorted(tmp_path.glob("*.ckpt")) if (int(path.suffixes[0][1:]) + 1) % accumulate == 0]
    assert len(between) == 12 // accumulate
    for path in between[:-1]:
        resumed = Record(4)
        run(config, tmp_path / "b", resumed, checkpoint=path, seed=9, options=options)
        assert resumed.history == whole.history, path.name
        saved = torch.load(path, weights_only=True)["callbacks"]["Record"]
        if not saved["codes"]:
            assert path.stat().st_size < 200_000


def test_with_accumulated_gradients_a_pair_has_a_step_between(config, tmp_path):
    """Steps are moments, not batches: two batches of one step would share their weights."""
    config["fold"]["name"] = "static"
    record = Record(ALL)
    run(config, tmp_path, record, options={"accumulate_grad_batches": 3})
    assert record.history["jitter"]["steps"] == [1]
    assert all(shares[0] > 0 for shares in record.history["jitter"]["layers"].values())


def test_other_ranks_record_nothing(config, tmp_path):
    record = Record(ALL)
    trainer = SimpleNamespace(is_global_zero=False, datamodule=None, estimated_stepping_batches=6, global_step=1)
    record.on_train_start(trainer, None)
    record.on_train_batch_start(trainer, None, None, 0)
    record.on_train_batch_end(trainer, None, None, None, 0)
    assert record.state_dict()["history"]["jitter"] == {"steps": [], "layers": {}}


def test_a_stop_in_the_middle_of_a_batch_leaves_no_hooks(config, tmp_path):
    kept = []

    class Stop(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            kept.append(pl_module.network)
            assert any(m._forward_hooks for m in pl_module.network.modules())
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        run(config, tmp_path, Record(ALL), Stop())
    assert not any(m._forward_hooks for m in kept[0].modules())


def observed(network, x):
    """(what a moment reads before its batch, changed shares), the second of two batches under the profiler or the eyes of CUDA."""
    layers = quantized_layers(network)
    first = WeightCodes(layers, {})
    network(x)
    first.close()
    sigmas = first.used()

    def moment():
        ends = range_ends(network)
        second = WeightCodes(layers, sigmas)
        network(x)
        shares = [changed(second.codes[name], first.codes[name]) for name in layers]
        second.close()
        second.used()
        return ends, shares

    moment()
    return moment


@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_an_observed_step_does_not_read_the_device(config, tmp_path, strategy):
    config["fold"]["name"] = strategy
    moment = observed(run(config, tmp_path, Record(0)).train(), torch.randn(16, 1, 8, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ends, shares = moment()
    assert len(ends) > len(shares) == len(LAYERS)
    assert "aten::_local_scalar_dense" not in {event.key for event in profile.key_averages()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", qat.STRATEGIES)
def test_an_observed_step_does_not_wait_for_the_gpu(config, tmp_path, strategy):
    config["fold"]["name"] = strategy
    moment = observed(run(config, tmp_path, Record(0)).cuda().train(), torch.randn(16, 1, 8, 8).cuda())
    torch.cuda.set_sync_debug_mode("error")
    try:
        moment()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def job(config, tmp_path, name="run"):
    folder = tmp_path / name
    folder.mkdir()
    run_job(config, folder)
    return folder, read_layers(folder)


def test_a_job_writes_what_happened_and_shows_it(config, tmp_path):
    config["trainer"]["max_epochs"] = 2
    config["report"] = {"moments": 5, "pictures": 40}
    folder, layers = job(config, tmp_path)
    assert list(layers) == ["version", "jitter", "jitter_statistics", "ranges", "filters", "sqnr", "alone"]
    assert layers["jitter"]["steps"] == layers["ranges"]["steps"] == [1, 3, 6, 9, 11]
    assert list(layers["jitter"]["layers"]) == list(layers["filters"]) == LAYERS
    assert {name for name in layers["ranges"]["tensors"] if name.startswith("quantizers.")} >= set(layers["sqnr"])
    assert all(math.isfinite(value) for value in layers["sqnr"].values()) and len(layers["sqnr"]) >= 4
    assert set(LAYERS) < set(layers["alone"]) and all(math.isfinite(value) for value in layers["alone"].values())
    assert [len(filters["after"]) for filters in layers["filters"].values()] == [6, 8, 4]
    page = (folder / "report.html").read_text()
    assert page.count("<svg") == 9 and "BN frozen at 6" in page
    json.loads((folder / "layers.json").read_text(), parse_constant=pytest.fail)
    assert read_result(folder)["seconds"]["layers"] > 0


def test_noise_is_that_of_the_integers(config, tmp_path):
    """More bits, less noise: 6 dB each, in the layers whose weights and inputs both have them."""
    found = {}
    for bits in (4, 8):
        for part in ("weight", "activation"):
            config["quant"][part]["bits"] = bits
        config["trainer"]["max_epochs"] = 0
        found[bits] = job(config, tmp_path, str(bits))[1]
    assert list(found[8]) == ["version", "filters", "sqnr", "alone"]
    gains = [found[8]["sqnr"][name] - found[4]["sqnr"][name] for name in found[4]["sqnr"]]
    assert len(gains) >= 4 and all(12 < gain < 36 for gain in gains), gains


def test_nothing_is_recorded_when_nothing_is_asked_for(config, tmp_path):
    config["report"] = {"moments": 0, "pictures": 0}
    folder, layers = job(config, tmp_path)
    assert list(layers) == ["version", "filters"]
    assert "report.moments=60" in (folder / "report.html").read_text()


def test_a_record_that_fails_does_not_cost_the_result(config, tmp_path, monkeypatch, caplog):
    config["trainer"]["max_epochs"] = 0
    monkeypatch.setattr("qat.train.layers.signal_to_noise", lambda *args: 1 / 0)
    folder, layers = job(config, tmp_path)
    assert list(layers) == ["version", "filters", "alone"] and "no sqnr (ZeroDivisionError" in caplog.text
    monkeypatch.setattr("qat.train.layers.write_layers", lambda *args: 1 / 0)
    folder, layers = job(config, tmp_path, "b")
    assert layers == {} and read_result(folder)["status"] == "ok" and (folder / "report.html").is_file()


def test_static_takes_the_filters_of_the_float_network(config, tmp_path):
    config["trainer"]["max_epochs"] = 0
    before = {}
    for strategy in ("static", "naive"):
        config["fold"]["name"] = strategy
        before[strategy] = {name: filters["before"] for name, filters in job(config, tmp_path, strategy)[1]["filters"].items()}
    assert before["static"] == before["naive"]


def test_a_stopped_and_resumed_job_writes_the_same_layers(config, tmp_path):
    class Stop(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 8:
                raise KeyboardInterrupt

    config["trainer"]["max_epochs"] = 2
    whole = job(config, tmp_path, "whole")[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qat.train.job.schedule_callbacks", lambda config: schedule_callbacks(config) | {"stop": Stop()})
        with pytest.raises(KeyboardInterrupt):
            job(config, tmp_path, "stopped")
    assert not (tmp_path / "stopped" / "layers.json").exists()
    config["resume"] = str(tmp_path / "stopped")
    assert job(config, tmp_path, "resumed")[1] == whole
